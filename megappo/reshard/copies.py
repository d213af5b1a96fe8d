"""One block to move: what plans are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


def block(offset: Sequence[int], size: Sequence[int]) -> tuple[int | slice, ...]:
    """Index of a block. An offset that is longer than the size begins with plain indices (of an expert)."""
    lead = len(offset) - len(size)
    slices = (slice(begin, begin + extent) for begin, extent in zip(offset[lead:], size, strict=True))
    return *offset[:lead], *slices


def cut(copy: Copy, most: int, first: int | None = None) -> Iterator[Copy]:
    """A block in pieces of at most so many elements, or of one row.

    Args:
        first: most elements of the first piece, if a row is no more.
    """
    elements, extent = copy.elements, copy.size[0]
    if elements <= (most if first is None else first):
        yield copy
        return
    rows = max(most * extent // elements, 1)
    start, end = 0, (first or 0) * extent // elements or rows
    while start < extent:
        yield copy._replace(
            source_offset=_down(copy.source_offset, start, len(copy.size)),
            offset=_down(copy.offset, start, len(copy.size)),
            size=(min(end, extent) - start, *copy.size[1:]),
        )
        start, end = end, end + rows


def _down(offset: tuple[int, ...], rows: int, dimensions: int) -> tuple[int, ...]:
    """The offset so many rows further on: along the first axis that the block's size has."""
    row = len(offset) - dimensions
    return *offset[:row], offset[row] + rows, *offset[row + 1 :]
