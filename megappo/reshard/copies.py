"""One block to move: what plans are made of."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple


class Copy(NamedTuple):
    """One block to move, in elements: ``size`` at ``source_offset`` of a source rank's parameter to a destination's.

    In the second wave the source is itself a destination of the first: it passes on what it has received, out of its
    own parameter. All copies of the first wave into that block come before.
    """

    source: int
    source_param: str
    source_offset: tuple[int, ...]
    destination: int
    param: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    name: str  # the global tensor, for messages
    wave: int = 0

    @property
    def elements(self) -> int:
        """Number of elements moved."""
        return prod(self.size)


def cut(copy: Copy, bucket_elements: int) -> Iterator[Copy]:
    """A block in pieces of at most so many elements, or of one row."""
    elements, extent = copy.elements, copy.size[0]
    if elements <= bucket_elements:
        yield copy
        return
    rows = max(bucket_elements * extent // elements, 1)
    for start in range(0, extent, rows):
        yield copy._replace(
            source_offset=_down(copy.source_offset, start, len(copy.size)),
            offset=_down(copy.offset, start, len(copy.size)),
            size=(min(rows, extent - start), *copy.size[1:]),
        )


def _down(offset: tuple[int, ...], rows: int, dimensions: int) -> tuple[int, ...]:
    """The offset so many rows further on: along the first axis that the block's size has."""
    row = len(offset) - dimensions
    return *offset[:row], offset[row] + rows, *offset[row + 1 :]
