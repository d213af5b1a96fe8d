"""Carrying out a plan: pack, send, receive, unpack, with at most two buckets of extra memory on either side."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megappo.reshard.files import block
from megappo.reshard.gloo import GlooTransport
from megappo.reshard.plan import Copy, Message

BUCKET_BYTES = 64 << 20
"""Size of a message. Two are in flight at a time."""


def send_weights(transport: GlooTransport, messages: Sequence[Message], params: Mapping[str, torch.Tensor]) -> int:
    """Send this rank's part of the plan.

    Args:
        messages: all messages, in the common order (those of other ranks are passed over).
        params: this rank's parameters by the names the plan uses.

    Returns:
        Bytes sent.

    Raises:
        RuntimeError: a receiver died or took longer than the transport's limit.
    """
    flying: deque[tuple[Any, torch.Tensor]] = deque()
    total = 0
    for message in messages:
        if message.source != transport.rank:
            continue
        if len(flying) == 2:
            flying.popleft()[0].wait()
        packed = torch.cat([_view(params, copy, source=True).reshape(-1) for copy in message.copies]).cpu()
        flying.append((transport.send(packed, message.destination), packed))
        total += packed.nbytes
    for work, _ in flying:
        work.wait()
    return total


def receive_weights(transport: GlooTransport, messages: Sequence[Message], params: Mapping[str, torch.Tensor]) -> int:
    """Receive this rank's part of the plan straight into its parameters, which keep their storage.

    Args:
        messages: all messages, in the common order.
        params: this rank's parameters by the names the plan uses, all of one dtype.

    Returns:
        Bytes received.

    Raises:
        RuntimeError: a sender died or took longer than the transport's limit. The parameters are then half new.
    """
    dtype = next(iter(params.values())).dtype
    mine = [message for message in messages if message.destination == transport.rank]
    flying: deque[tuple[Any, torch.Tensor, Message]] = deque()
    total = 0

    def finish_oldest() -> None:
        work, packed, message = flying.popleft()
        work.wait()
        begin = 0
        for copy in message.copies:
            values = packed[begin : begin + copy.elements].view(copy.size)
            _view(params, copy, source=False).copy_(values)
            begin += copy.elements

    with torch.no_grad():
        for message in mine:
            if len(flying) == 2:
                finish_oldest()
            packed = torch.empty(message.elements, dtype=dtype)
            flying.append((transport.receive(packed, message.source), packed, message))
            total += packed.nbytes
        while flying:
            finish_oldest()
    return total


def _view(params: Mapping[str, torch.Tensor], copy: Copy, *, source: bool) -> torch.Tensor:
    if source:
        return params[copy.source_param][block(copy.source_offset, copy.size)]
    return params[copy.param][block(copy.offset, copy.size)]
