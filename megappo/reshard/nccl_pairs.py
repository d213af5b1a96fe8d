"""Communicators of two over NCCL, apart from every other group of the process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any, Literal

import torch
import torch.distributed as dist

from megappo.layout.communicators import CHANNELS, pair_channels

Verb = Literal["send", "recv"]


def make_pair(store: Any, rank: int, peers: int) -> Any:
    """A communicator of two, not yet connected, one of so many that an end of it has."""
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    if (channels := pair_channels(peers)) < CHANNELS:
        options.config.max_ctas = channels
    with _without_watchdog():
        return nccl(store, rank, 2, options)


def launch(pair: Any, verb: Verb, pieces: Sequence[torch.Tensor], other: int) -> Any:
    """Start to send or to receive pieces, all in one."""
    start = getattr(pair, verb)
    pair._start_coalescing()
    try:
        for piece in pieces:
            start([piece], other, 0)
    finally:  # left open, it would hold back whatever else this thread does over NCCL
        work = pair._end_coalescing()
    return work


def abort_pairs(pairs: Iterable[Any], limit_s: float) -> None:
    """End communicators, as far as it goes within a limit: one that hangs keeps none of the others."""
    ends = [Thread(target=_abort, args=(pair,), daemon=True) for pair in pairs]
    for end in ends:
        end.start()
    deadline = time.monotonic() + limit_s
    for end in ends:
        end.join(max(deadline - time.monotonic(), 0.0))


def _abort(pair: Any) -> None:
    with suppress(RuntimeError):
        pair.abort()


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """Torch's own, a thread, would end the whole process where a peer is lost: our limits end the sync, and name it.

    The constructor reads this, and nothing later does. ``wait`` of what it carries then waits on the host;
    ``synchronize`` does not.
    """
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
