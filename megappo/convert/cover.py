"""Whether chunks are all of a checkpoint's tensors, and nothing twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from pathlib import Path

from megappo.formats.dtypes import FLOATS, Dtype
from megappo.formats.torch_dist import Chunk
from megappo.models.spec import ModelError


def check_cover(folder: Path, chunks: Sequence[Chunk], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Every element must be in one chunk, and in no more.

    That is so if and only if the chunks' corners, each with its sign, add up to those of the tensor: sums of boxes are
    equal where their differences along all axes are, which are not zero at corners only.
    """
    corners = {
        key: Counter({point: -sign for point, sign in _corners((0,) * len(shape), shape)})
        for key, shape in shapes.items()
    }
    missing = {key: prod(shape) for key, shape in shapes.items()}
    for chunk in chunks:
        missing[chunk.key] -= prod(chunk.size)
        for point, sign in _corners(chunk.offset, chunk.size):
            corners[chunk.key][point] += sign
    problems = [
        f"{folder}: lacks {count} elements of {key}: save it again" for key, count in missing.items() if count > 0
    ]
    problems += [
        f"{folder}: tensor {key} is {dtype}: save it as 16- or 32-bit floats"
        for key, dtype in sorted({(chunk.key, _named(chunk.dtype)) for chunk in chunks if chunk.dtype not in FLOATS})
    ]
    problems += [
        f"{folder}/.metadata: chunks of {key} overlap or lie outside of it: copy the checkpoint again"
        for key, count in missing.items()
        if count <= 0 and any(corners[key].values())
    ]
    if problems:
        raise ModelError(problems)


def _named(dtype: object) -> str:
    return dtype.name if isinstance(dtype, Dtype) else "of an unknown dtype"


def _corners(offset: Sequence[int], size: Sequence[int]) -> Iterator[tuple[tuple[int, ...], int]]:
    ends = [((begin, 1), (begin + extent, -1)) for begin, extent in zip(offset, size, strict=False)]
    for corner in product(*ends):
        yield tuple(place for place, _ in corner), prod(sign for _, sign in corner)
