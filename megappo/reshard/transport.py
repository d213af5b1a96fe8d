"""What carries blocks from one rank to another: one small interface, and what all carriers share.

A transport takes a message as the list of its blocks and brings it to the other side's list of blocks, of the same
sizes in the same order. It packs them on the way if it has to. Nobody above knows how the bytes travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch


class Blocks(Sequence[torch.Tensor]):
    """The blocks of a message: views into parameters, all of one dtype.

    It is equal only to itself: a transport may remember what it has worked out for it.
    """

    def __init__(self, views: Iterable[torch.Tensor]) -> None:
        """Keep the views.

        Args:
            views: in the order in which they travel.
        """
        self._views = tuple(views)
        self.nbytes = size_of(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def __getitem__(self, at: Any) -> Any:
        return self._views[at]


PATIENCE = 1.05
"""Times the limit that a rank nearer to the cause has, which is to be heard first: a sender's receiver may itself wait
for somebody, and so may one who passes on."""


class TransferError(RuntimeError):
    """A peer died, or kept this rank waiting for longer than the limit; the message names it."""


class Work(Protocol):
    """A message under way."""

    def wait(self) -> None:
        """Return once it is done: the blocks sent may change again, those received hold the values.

        On a GPU that is so for whatever its current stream does next; :meth:`Transport.finish` waits for the stream.

        Raises:
            TransferError: it will not arrive.
        """


class Transport(Protocol):
    """Carries messages in order between each two ranks."""

    def tends(self, blocks: Blocks) -> bool:
        """Whether a message takes this rank's memory or help until ``wait`` returns; others travel by themselves."""

    def send(self, blocks: Blocks, to: int, patience: float = PATIENCE) -> Work:
        """Start to send.

        Args:
            patience: times the limit that the other one may take.
        """

    def receive(self, blocks: Blocks, source: int, patience: float = 1.0) -> Work:
        """Start to receive into the blocks.

        Args:
            patience: times the limit that the other one may take.
        """

    def finish(self) -> None:
        """Return once every message that was waited for has truly arrived.

        Raises:
            TransferError: one will not.
        """

    def abort(self) -> None:
        """Let go of whatever is under way, after a failure: peers notice, nothing can be sent any more."""


class Buckets:
    """Pieces of memory for packed messages, made when first needed."""

    def __init__(self, size: int, make: Callable[[int], torch.Tensor] | None = None) -> None:
        """Nothing is allocated yet.

        Args:
            size: of each, in bytes, if no more is asked for.
            make: allocates bytes; on the CPU by default.
        """
        self._size, self._make = size, make or (lambda size: torch.empty(size, dtype=torch.uint8))
        self._free: list[torch.Tensor] = []

    def take(self, least: int = 0) -> torch.Tensor:
        """One that nobody uses and that holds so many bytes, uint8; it takes the place of one that does not."""
        found = self._free.pop() if self._free else None
        return found if found is not None and found.nbytes >= least else self._make(max(self._size, least))

    def give(self, bucket: torch.Tensor) -> None:
        """Return it."""
        self._free.append(bucket)

    def drop(self) -> None:
        """Give up those that nobody uses."""
        self._free.clear()


def size_of(blocks: Sequence[torch.Tensor]) -> int:
    """Bytes that blocks take."""
    return sum(block.nbytes for block in blocks)


def in_one_piece(blocks: Blocks) -> bool:
    """Whether a message lies in one piece in its parameter, and need not be packed."""
    return len(blocks) == 1 and blocks[0].is_contiguous()


def pack(blocks: Blocks, bucket: torch.Tensor) -> torch.Tensor:
    """Copy blocks one after the other into a bucket; returns the part that they take, uint8."""
    for part, block in parts(blocks, bucket):
        part.copy_(block)
    return bucket[: size_of(blocks)]


def unpack(bucket: torch.Tensor, blocks: Blocks) -> None:
    """Copy blocks out of a bucket."""
    for part, block in parts(blocks, bucket):
        block.copy_(part)


def parts(blocks: Blocks, bucket: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(its place in the bucket, the block) of each, one after the other."""
    elements = bucket[: size_of(blocks)].view(blocks[0].dtype)
    cuts = elements.split([block.numel() for block in blocks])
    return ((cut.view(block.shape), block) for cut, block in zip(cuts, blocks, strict=True))
