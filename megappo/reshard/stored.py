"""Tensors that lie in files, row by row without gaps: any block can be read, written and copied in its place."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path

import torch

WORTH_A_CALL = 2**16
"""Bytes in one piece from which on the kernel copies them itself."""

NO_KERNEL_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file.

    Attributes:
        position: of its first byte in the file.
    """

    path: Path
    position: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return prod(self.shape) * self.dtype.itemsize

    def read(self, offset: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        """A copy of one block; no other byte of the file is read.

        Raises:
            EOFError: the file is shorter than it should be.
        """
        values = torch.empty(tuple(size), dtype=self.dtype)
        buffer, length = _bytes(values), self._run(size)
        with self.path.open("rb", buffering=0) as file:
            for number, begin in enumerate(self._begins(offset, size, length)):
                done = 0
                while done < length:
                    piece = buffer[number * length + done : (number + 1) * length]
                    count = os.preadv(file.fileno(), [piece], begin + done)
                    if count == 0:
                        raise EOFError(f"{self.path}: ends before byte {begin + length}")
                    done += count
        return values

    def write(self, offset: Sequence[int], values: torch.Tensor) -> None:
        """Write one block, in this tensor's dtype; the file must be there."""
        buffer, length = _bytes(values.to(self.dtype).contiguous()), self._run(values.shape)
        with self.path.open("rb+", buffering=0) as file:
            for number, begin in enumerate(self._begins(offset, values.shape, length)):
                done = 0
                while done < length:
                    piece = buffer[number * length + done : (number + 1) * length]
                    done += os.pwrite(file.fileno(), piece, begin + done)

    def _run(self, size: Sequence[int]) -> int:
        """Bytes of a block that are in one piece."""
        return prod(size[self._cut(size) :]) * self.dtype.itemsize

    def _cut(self, size: Sequence[int]) -> int:
        """The last axis that a block does not span: from there on it is in one piece."""
        return max((axis for axis, extent in enumerate(self.shape) if size[axis] != extent), default=0)

    def _begins(self, offset: Sequence[int], size: Sequence[int], length: int) -> Iterator[int]:
        """Where in the file each ``length`` bytes of a block begin."""
        axis, elements = len(size), length // self.dtype.itemsize
        while prod(size[axis:]) < elements:
            axis -= 1
        strides = [prod(self.shape[i + 1 :]) for i in range(len(size))]
        first = sum(o * stride for o, stride in zip(offset, strides, strict=True))
        for index in product(*map(range, size[:axis])):
            at = first + sum(i * stride for i, stride in zip(index, strides, strict=False))
            yield self.position + at * self.dtype.itemsize


def copy_block(
    source: Stored,
    source_offset: Sequence[int],
    target: Stored,
    target_offset: Sequence[int],
    size: Sequence[int],
    bucket_bytes: int,
) -> None:
    """Copy a block from one file into another, converted to the target's dtype.

    Long runs of bytes are copied by the kernel; what is in small pieces, or changes its dtype, goes through at most
    ``bucket_bytes`` of memory at a time.
    """
    length = min(source._run(size), target._run(size))
    if source.dtype == target.dtype and length >= WORTH_A_CALL:
        begins = zip(
            source._begins(source_offset, size, length), target._begins(target_offset, size, length), strict=True
        )
        if _copy_in_kernel(source.path, target.path, begins, length):
            return
    widest = max(source.dtype.itemsize, target.dtype.itemsize)
    for offset, extent in row_blocks([0] * len(size), size, bucket_bytes // widest):
        there = [a + b for a, b in zip(target_offset, offset, strict=True)]
        target.write(there, source.read([a + b for a, b in zip(source_offset, offset, strict=True)], extent))


def _copy_in_kernel(source: Path, target: Path, begins: Iterator[tuple[int, int]], length: int) -> bool:
    """Copy runs of bytes; ``False`` where these file systems do not let the kernel do it."""
    with source.open("rb", buffering=0) as reader, target.open("rb+", buffering=0) as writer:
        for here, there in begins:
            done = 0
            while done < length:
                try:
                    count = os.copy_file_range(
                        reader.fileno(), writer.fileno(), length - done, here + done, there + done
                    )
                except OSError as error:
                    if error.errno in NO_KERNEL_COPY:
                        return False
                    raise
                if count == 0:
                    raise EOFError(f"{source}: ends before byte {here + length}")
                done += count
    return True


def _bytes(values: torch.Tensor) -> memoryview:
    return values.view(-1).view(torch.uint8).numpy().data


def row_blocks(
    offset: Sequence[int], size: Sequence[int], bucket_elements: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a block along its first axis into (offset, size) of at most ``bucket_elements``; never through a row."""
    rows = max(bucket_elements * size[0] // max(prod(size), 1), 1)
    for start in range(0, size[0], rows):
        yield (offset[0] + start, *offset[1:]), (min(rows, size[0] - start), *size[1:])
