"""Carrying out a plan: each rank works through its own messages, several at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from megappo.reshard.copies import Copy, block
from megappo.reshard.messages import Message
from megappo.reshard.transport import PATIENCE, Blocks, Transport, Work

BUCKET_BYTES = 16 << 20
"""A rank packs and unpacks in at most two of these, whatever the model's size; on a GPU, of sixteen times as much."""


class Pace(NamedTuple):
    """How messages are cut, and how many are under way.

    Attributes:
        message_bytes: most of one message.
        direct_bytes: blocks of this size are not joined with others (over NCCL, they are launched with others), so that
            they need not be packed where they lie in one piece.
        in_flight: messages under way that take memory; one is packed or unpacked while others travel.
    """

    message_bytes: int
    direct_bytes: int
    in_flight: int


ON_DEVICE = Pace(message_bytes=16 * BUCKET_BYTES, direct_bytes=BUCKET_BYTES, in_flight=2)
"""Between GPUs: large messages of few pieces. NVLink carries 256 MiB between two H200 in 0.72 ms if they are packed, as
fast as it gets, and in 0.78 ms in 14 pieces; packing takes 0.02 ms of either GPU meanwhile.
"""

ON_HOST = Pace(message_bytes=4 << 20, direct_bytes=256 << 10, in_flight=4)
"""Where processes share cores, each is to find some work that is ready."""


class Moved(NamedTuple):
    """Bytes that one rank sent and received."""

    sent: int
    received: int


@torch.no_grad()
def carry_out(
    rank: int,
    messages: Sequence[Message],
    in_flight: int,
    blocks_of: Callable[[Message], Blocks],
    carrier: Callable[[int], Transport],
    arrived: Callable[[], None] = lambda: None,
    under_way: Callable[[], None] = lambda: None,
    landing: Callable[[], None] = lambda: None,
) -> Moved:
    """Do this rank's part of a plan. Parameters keep their storage.

    Args:
        messages: this rank's, in the common order.
        in_flight: limit on messages under way, but for those that their transport carries without this rank's help.
        blocks_of: what a message carries out of this rank's parameters, or into them; see :func:`find_blocks`.
        carrier: the transport to and from a rank.
        arrived: called at the end of each phase.
        under_way: called once all that this rank sends is on its way.
        landing: called once a GPU's current stream (the host, on a CPU) goes on with all that was received, which may
            not have come yet: what is launched then has to wait for nobody but the stream.

    Raises:
        TransferError: a peer died or took longer than the limit. Parameters received into are then half new.
    """
    tended: deque[Work] = deque()
    alone: deque[Work] = deque()
    used: dict[int, Transport] = {}
    sent = received = 0
    before = messages[0] if messages else Message(rank, rank, ())
    for message in messages:
        if (message.phase, message.wave) != (before.phase, before.wave):  # what is passed on has arrived before
            _wait(tended, alone)
            if message.phase != before.phase:
                _finish(used)
                arrived()
        before = message
        sends = message.source == rank
        peer = message.destination if sends else message.source
        blocks = blocks_of(message)
        if peer not in used:
            used[peer] = carrier(peer)
        transport = used[peer]
        tends = transport.tends(blocks)
        if tends and len(tended) == in_flight:
            tended.popleft().wait()
        work = (transport.send if sends else transport.receive)(blocks, peer, PATIENCE ** (message.wave + sends))
        (tended if tends else alone).append(work)
        sent, received = (sent + blocks.nbytes, received) if sends else (sent, received + blocks.nbytes)
    under_way()
    _wait(tended, alone)
    landing()
    _finish(used)
    arrived()
    return Moved(sent, received)


def _wait(*queues: deque[Work]) -> None:
    """Until all are done, in order."""
    for queue in queues:
        while queue:
            queue.popleft().wait()


def _finish(used: Mapping[int, Transport]) -> None:
    for transport in dict.fromkeys(used.values()):
        transport.finish()


def find_blocks(rank: int, params: Mapping[str, torch.Tensor], message: Message) -> Blocks:
    """What a message carries out of this rank's parameters, or into them.

    Args:
        params: by the names the plan uses, all of one dtype.
    """
    view = source_block if message.source == rank else destination_block
    return Blocks(view(params, copy) for copy in message.copies)


class KeptBlocks:
    """Finds the blocks of a rank's messages once, as long as its parameters are the same views of the same storages.

    The memory of a storage may come and go meanwhile: its views see that.
    """

    def __init__(self, rank: int, messages: Sequence[Message]) -> None:
        """Nothing is found yet.

        Args:
            messages: this rank's.
        """
        self._rank, self._messages = rank, messages
        self._seen: list[tuple[Any, ...]] = []
        self._kept: dict[int, Blocks] = {}

    def of(self, params: Mapping[str, torch.Tensor]) -> Callable[[Message], Blocks]:
        """What :func:`find_blocks` finds in these parameters."""
        seen = [(p.untyped_storage()._cdata, p.storage_offset(), p.shape, p.stride()) for p in params.values()]
        if seen != self._seen:  # a storage of which views are kept lives on, so that no other can have its number
            find = partial(find_blocks, self._rank, params)
            self._seen, self._kept = seen, {id(message): find(message) for message in self._messages}
        return lambda message: self._kept[id(message)]


def source_block(params: Mapping[str, torch.Tensor], copy: Copy) -> torch.Tensor:
    """What a copy reads, out of the sender's parameters."""
    return params[copy.source_param][_index(copy.source_offset, copy.size)]


def destination_block(params: Mapping[str, torch.Tensor], copy: Copy) -> torch.Tensor:
    """What a copy writes, in the receiver's parameters."""
    return params[copy.param][_index(copy.offset, copy.size)]


@cache
def _index(offset: tuple[int, ...], size: tuple[int, ...]) -> tuple[int | slice, ...]:
    """Each sync asks for the same."""
    return block(offset, size)
