"""Values of one type as those of another, where none that is finite may become infinite."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from megappo.formats.dtypes import DTYPES, Dtype
from megappo.models.spec import ModelError

if TYPE_CHECKING:
    import torch


class OutOfRange(Exception):
    """A finite value of a tensor would become infinite.

    Attributes:
        name: of the tensor.
        dtype: that has no room for the value.
    """

    def __init__(self, name: str, dtype: Dtype) -> None:
        super().__init__(name, dtype)
        self.name, self.dtype = name, dtype

    def refusal(self, source: object, largest: float) -> ModelError:
        """The same for a user.

        Args:
            source: where the tensor comes from.
            largest: of its absolute values.
        """
        fitting = " or ".join(name for name in ("bfloat16", "float32") if largest <= _most(DTYPES[name]))
        return ModelError(
            [
                f"{source}: tensor {self.name} has values of up to {largest:.6g} (absolute), and {self.dtype} ends at "
                f"{_most(self.dtype):.6g}, so that they would become infinite: give --dtype {fitting}"
            ]
        )


def converted(values: memoryview, dtype: Dtype, wanted: Dtype, name: str) -> memoryview:
    """Values of a type, given as bytes, as those of another; infinities and NaN stay what they are.

    Args:
        name: of the tensor that they belong to.

    Raises:
        OutOfRange: one is too large.
    """
    import torch

    before = torch.frombuffer(values, dtype=dtype.torch)
    after = before.to(wanted.torch)
    if _most(wanted) < _most(dtype) and overflows(before, after):
        raise OutOfRange(name, wanted)
    return as_bytes(after)


def overflows(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether what was finite is not any more."""
    if all(math.isfinite(bound) for bound in after.aminmax()):  # many times as fast as isfinite on each element
        return False
    return bool((before.isfinite() & ~after.isfinite()).any())


def largest_of(values: memoryview, dtype: Dtype) -> float:
    """The largest absolute value of those given as bytes, but for infinities and NaN."""
    import torch

    absolute = torch.frombuffer(values, dtype=dtype.torch).float().abs()
    return float(absolute.where(absolute.isfinite(), torch.zeros(())).max())


def as_bytes(values: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor, in its memory."""
    import torch

    return memoryview(values.view(-1).view(torch.uint8).numpy().data)


def _most(dtype: Dtype) -> float:
    import torch

    return torch.finfo(dtype.torch).max
