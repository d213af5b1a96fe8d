"""Types of elements by name: who only moves bytes need not import torch, which takes as long as many a conversion."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Dtype(NamedTuple):
    """Attributes:
    name: torch's.
    code: that of safetensors.
    itemsize: bytes of an element.
    """

    name: str
    code: str
    itemsize: int

    @property
    def torch(self) -> torch.dtype:
        """The very type; imports torch."""
        import torch

        found: torch.dtype = getattr(torch, self.name)
        return found

    def __str__(self) -> str:
        return self.name


DTYPES = {
    dtype.name: dtype
    for dtype in (
        Dtype("float64", "F64", 8),
        Dtype("float32", "F32", 4),
        Dtype("float16", "F16", 2),
        Dtype("bfloat16", "BF16", 2),
        Dtype("int64", "I64", 8),
        Dtype("int32", "I32", 4),
        Dtype("int16", "I16", 2),
        Dtype("int8", "I8", 1),
        Dtype("uint8", "U8", 1),
        Dtype("bool", "BOOL", 1),
        Dtype("float8_e4m3fn", "F8_E4M3", 1),
        Dtype("float8_e5m2", "F8_E5M2", 1),
    )
}

FLOATS = {
    DTYPES[name]: storage
    for name, storage in (("bfloat16", "BFloat16Storage"), ("float16", "HalfStorage"), ("float32", "FloatStorage"))
}
"""Types that weights may have, with torch's names of their storages in a pickle."""
