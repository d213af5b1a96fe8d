"""Carrying out a plan: each rank works through its own messages, two at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from megappo.reshard.copies import Copy
from megappo.reshard.files import block
from megappo.reshard.messages import Message
from megappo.reshard.transport import Transport, Work, size_of

BUCKET_BYTES = 16 << 20
"""Size of a message. Two are under way at a time, so one is packed or unpacked while another travels."""

DIRECT_BYTES = 2 << 20
"""Blocks of this size travel alone, so that they need not be packed where they lie in one piece."""

IN_FLIGHT = 2


class Moved(NamedTuple):
    """Bytes that one rank sent and received."""

    sent: int
    received: int


@torch.no_grad()
def carry_out(
    rank: int,
    messages: Sequence[Message],
    params: Mapping[str, torch.Tensor],
    carrier: Callable[[int], Transport],
    arrived: Callable[[], None] = lambda: None,
) -> Moved:
    """Do this rank's part of a plan. Parameters keep their storage.

    Args:
        messages: this rank's, in the common order.
        params: this rank's parameters by the names the plan uses, all of one dtype.
        carrier: the transport to and from a rank.
        arrived: called at the end of each phase.

    Raises:
        TransferError: a peer died or took longer than the limit. Parameters received into are then half new.
    """
    flying: deque[Work] = deque()
    sent = received = 0
    before = messages[0] if messages else None
    for message in messages:
        together = before is not None and (message.phase, message.wave) == (before.phase, before.wave)
        while len(flying) >= (IN_FLIGHT if together else 1):  # what is passed on has arrived before
            flying.popleft().wait()
        if before is not None and message.phase != before.phase:
            arrived()
        before = message
        if message.source == rank:
            blocks = [source_block(params, copy) for copy in message.copies]
            flying.append(carrier(message.destination).send(blocks, message.destination))
            sent += size_of(blocks)
        else:
            blocks = [destination_block(params, copy) for copy in message.copies]
            flying.append(carrier(message.source).receive(blocks, message.source))
            received += size_of(blocks)
    while flying:
        flying.popleft().wait()
    arrived()
    return Moved(sent, received)


def source_block(params: Mapping[str, torch.Tensor], copy: Copy) -> torch.Tensor:
    """What a copy reads, out of the sender's parameters."""
    return params[copy.source_param][block(copy.source_offset, copy.size)]


def destination_block(params: Mapping[str, torch.Tensor], copy: Copy) -> torch.Tensor:
    """What a copy writes, in the receiver's parameters."""
    return params[copy.param][block(copy.offset, copy.size)]
