"""Tensors that lie in files, row by row without gaps: any block can be read, written and copied in its place."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from megappo.formats.casts import as_bytes, converted, largest_of
from megappo.formats.dtypes import Dtype
from megappo.models.spec import ModelError

if TYPE_CHECKING:
    import torch

PIECE_BYTES = 2**18
"""What is copied at a time (or one row): it stays in a core's cache between being read, summed and written."""

MOST_FILES = 128
"""That a process has open."""


class Files:
    """Files by path, opened when first needed, and memory to copy through; a context manager, which closes them."""

    def __init__(self) -> None:
        self._open: dict[tuple[Path, int], int] = {}
        self._memory = bytearray()

    def __enter__(self) -> Files:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def read(self, path: Path, position: int, buffer: memoryview) -> None:
        """Fill a buffer.

        Raises:
            ModelError: the file cannot be read, or is shorter than it should be.
        """
        done = 0
        try:
            descriptor = self._descriptor(path, os.O_RDONLY)
            while done < len(buffer):
                count = os.preadv(descriptor, [buffer[done:]], position + done)
                if count == 0:
                    raise EOFError(f"it ends before byte {position + len(buffer)}")
                done += count
        except (OSError, EOFError) as error:
            raise ModelError([f"{path}: cannot be read ({error}): copy it again"]) from None

    def write(self, path: Path, position: int, content: memoryview | bytes) -> None:
        """Write all of it; the file must be there."""
        descriptor, done = self._descriptor(path, os.O_WRONLY), 0
        while done < len(content):
            done += os.pwrite(descriptor, content[done:], position + done)

    def memory(self, size: int) -> memoryview:
        """So many bytes, the same each time."""
        if len(self._memory) < size:
            self._memory = bytearray(size)
        return memoryview(self._memory)[:size]

    def _descriptor(self, path: Path, flags: int) -> int:
        found = self._open.get((path, flags))
        if found is None:
            if len(self._open) == MOST_FILES:
                os.close(self._open.pop(next(iter(self._open))))
            found = self._open[path, flags] = os.open(path, flags | os.O_CLOEXEC)
        return found


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file.

    Attributes:
        position: of its first byte in the file.
    """

    path: Path
    position: int
    dtype: Dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return prod(self.shape) * self.dtype.itemsize

    def read(self, offset: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        """A copy of one block; no other byte of the file is read.

        Raises:
            ModelError: the file cannot be read, or is shorter than it should be.
        """
        import torch

        values = torch.empty(tuple(size), dtype=self.dtype.torch)
        with Files() as files:
            self.read_into(files, offset, size, as_bytes(values))
        return values

    def write(self, offset: Sequence[int], values: torch.Tensor) -> None:
        """Write one block, in this tensor's dtype; the file must be there."""
        with Files() as files:
            self.write_from(files, offset, values.shape, as_bytes(values.to(self.dtype.torch).contiguous()))

    def read_into(self, files: Files, offset: Sequence[int], size: Sequence[int], buffer: memoryview) -> None:
        """Fill a buffer, of just their length, with the bytes of one block; no other byte of the file is read.

        Raises:
            ModelError: the file cannot be read, or is shorter than it should be.
        """
        for begin, piece in self._runs(offset, size, buffer):
            files.read(self.path, begin, piece)

    def write_from(self, files: Files, offset: Sequence[int], size: Sequence[int], buffer: memoryview) -> None:
        """Write the bytes of one block; the file must be there."""
        for begin, piece in self._runs(offset, size, buffer):
            files.write(self.path, begin, piece)

    def _runs(self, offset: Sequence[int], size: Sequence[int], buffer: memoryview) -> Iterator[tuple[int, memoryview]]:
        """The pieces of a block that are in one piece in the file: where they begin, and their part of the buffer."""
        steps = strides(self.shape)
        first = sum(o * step for o, step in zip(offset, steps, strict=True))
        # From the last axis on that a block does not span, it is in one piece.
        cut = max((axis for axis, extent in enumerate(self.shape) if size[axis] != extent), default=0)
        length = prod(size[cut:]) * self.dtype.itemsize
        for number, index in enumerate(product(*map(range, size[:cut]))):
            at = first + sum(i * step for i, step in zip(index, steps, strict=False))
            yield self.position + at * self.dtype.itemsize, buffer[number * length : (number + 1) * length]


def strides(size: Sequence[int]) -> tuple[int, ...]:
    """Those of a contiguous tensor."""
    return tuple(prod(size[axis + 1 :]) for axis in range(len(size)))


def pieces(
    files: Files, stored: Stored, offset: Sequence[int], size: Sequence[int], item_bytes: int = 0
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], memoryview]]:
    """Read a block in pieces of some rows, in their order: where in the block each is, its size and its bytes.

    The bytes are those of the next piece once that is asked for.

    Args:
        item_bytes: that an element shall count, if it is more than its own.
    """
    item_bytes = max(item_bytes, stored.dtype.itemsize)
    for begin, extent in row_blocks([0] * len(size), size, PIECE_BYTES // item_bytes):
        buffer = files.memory(prod(extent) * stored.dtype.itemsize)
        stored.read_into(files, moved(offset, begin), extent, buffer)
        yield begin, extent, buffer


def copy_block(
    files: Files,
    source: Stored,
    source_offset: Sequence[int],
    target: Stored,
    target_offset: Sequence[int],
    size: Sequence[int],
    name: str,
) -> Iterator[tuple[memoryview, memoryview]]:
    """Copy a block of a tensor from one file into another, converted to the target's dtype.

    Args:
        name: of the tensor.

    Yields:
        Each piece, in their order: its bytes as they were read, and as they were written.

    Raises:
        OutOfRange: a value is too large for the target's dtype.
    """
    for begin, extent, read in pieces(files, source, source_offset, size, target.dtype.itemsize):
        written = read if source.dtype == target.dtype else converted(read, source.dtype, target.dtype, name)
        target.write_from(files, moved(target_offset, begin), extent, written)
        yield read, written


def same_bytes(a: Stored, b: Stored) -> bool:
    """Whether two tensors are the same, in dtype, shape and every byte.

    Raises:
        ModelError: a file cannot be read, or is shorter than it should be.
    """
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    whole = [0] * len(a.shape), a.shape
    with Files() as ours, Files() as theirs:
        pairs = zip(pieces(ours, a, *whole), pieces(theirs, b, *whole), strict=True)
        return all(bytes(one) == bytes(other) for (*_, one), (*_, other) in pairs)


def largest(blocks: Iterable[tuple[Stored, Sequence[int], Sequence[int]]]) -> float:
    """The largest absolute value of blocks, each with its offset and size, but for infinities and NaN."""
    with Files() as files:
        return max(
            largest_of(values, stored.dtype)
            for stored, offset, size in blocks
            for *_, values in pieces(files, stored, offset, size)
        )


def prepare(dtypes: set[Dtype]) -> None:
    """Import what conversions between several dtypes need: before processes start, which then share it."""
    if len(dtypes) > 1:
        import torch  # noqa: F401


def moved(offset: Sequence[int], by: Sequence[int]) -> list[int]:
    """An offset, further on."""
    return [a + b for a, b in zip(offset, by, strict=True)]


def row_blocks(
    offset: Sequence[int], size: Sequence[int], bucket_elements: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a block along its first axis into (offset, size) of at most ``bucket_elements``; never through a row."""
    rows = max(bucket_elements * size[0] // max(prod(size), 1), 1)
    for start in range(0, size[0], rows):
        yield (offset[0] + start, *offset[1:]), (min(rows, size[0] - start), *size[1:])
