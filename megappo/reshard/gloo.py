"""Messages over gloo, in a group of its own that leaves every other process group alone.

Blocks in host memory that lie in one piece go straight from parameter to parameter. Others are packed; those on a GPU
are staged through pinned host memory.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megappo.reshard.transport import Blocks, Buckets, TransferError, flat, pack, size_of, unpack

DATA, READY, FREE, SUMS = range(4)
"""Kinds of traffic between two ranks; each keeps its own order."""


def host_store(host: str, timeout_s: float) -> dist.TCPStore:
    """Open a meeting point for process groups on this host, at a free port (``.port``)."""
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


class GlooTransport:
    """The transfer group. All ranks are in it, whatever carries their messages: it carries their notes.

    Creating it is collective: it returns once all ``world`` ranks have come.
    """

    def __init__(
        self,
        host: str,
        port: int,
        rank: int,
        world: int,
        timeout_s: float,
        bucket_bytes: int,
        describe: Callable[[int], str] = "rank {}".format,
    ) -> None:
        """Join.

        Args:
            host, port: of a :func:`host_store`.
            rank, world: in the transfer group.
            timeout_s: limit on joining and on each message, in seconds.
            bucket_bytes: size of the largest message.
            describe: names a rank for people.
        """
        timeout = timedelta(seconds=timeout_s)
        self.store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        self.rank, self.timeout_s, self.describe = rank, timeout_s, describe
        self._buckets = Buckets(bucket_bytes)
        self._pinned = Buckets(bucket_bytes, lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True))
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timeout
        # Left to itself gloo binds to what the host's own name resolves to, which on many machines is the loopback.
        options._devices = [gloo.create_device(hostname=_own_address(host, port))]
        self._group: Any = gloo(dist.PrefixStore("megappo-transfer", self.store), rank, world, options)

    def send(self, blocks: Blocks, to: int) -> GlooWork:
        """Start to send; see :class:`megappo.reshard.transport.Transport`."""
        on_host = blocks[0].device.type == "cpu"
        straight = flat(blocks) if on_host else None
        if straight is not None:
            return self.post(straight, to, DATA)
        buckets = self._buckets if on_host else self._pinned
        bucket = buckets.take()
        if on_host:
            data = pack(blocks, bucket)
        else:  # packed there: one copy over the bus instead of many
            data = bucket[: size_of(blocks)]
            data.copy_(torch.cat([block.reshape(-1) for block in blocks]).view(torch.uint8))
        return self.post(data, to, DATA, then=lambda: buckets.give(bucket))

    def receive(self, blocks: Blocks, source: int) -> GlooWork:
        """Start to receive; see :class:`megappo.reshard.transport.Transport`."""
        on_host = blocks[0].device.type == "cpu"
        straight = flat(blocks) if on_host else None
        if straight is not None:
            return self.expect(straight, source, DATA)
        buckets = self._buckets if on_host else self._pinned
        bucket = buckets.take()
        data = bucket[: size_of(blocks)]

        def done() -> None:
            unpack(data if on_host else data.to(blocks[0].device), blocks)
            buckets.give(bucket)

        return self.expect(data, source, DATA, then=done)

    def post(self, data: torch.Tensor, to: int, kind: int, then: Callable[[], None] | None = None) -> GlooWork:
        """Start to send a contiguous tensor in host memory; ``then`` is called by ``wait`` when it has gone."""
        work = self._group.send([data.view(-1).view(torch.uint8)], to, kind)
        return GlooWork(work, data, f"{self.describe(to)} took nothing", self.timeout_s, then)

    def expect(self, data: torch.Tensor, source: int, kind: int, then: Callable[[], None] | None = None) -> GlooWork:
        """Start to receive into a contiguous tensor in host memory; ``then`` is called by ``wait`` when it is there."""
        work = self._group.recv([data.view(-1).view(torch.uint8)], source, kind)
        return GlooWork(work, data, f"{self.describe(source)} sent nothing", self.timeout_s, then)


class GlooWork:
    """A message under way; it keeps its tensor alive."""

    def __init__(
        self, work: Any, data: torch.Tensor, lateness: str, timeout_s: float, then: Callable[[], None] | None
    ) -> None:
        self._work, self._data, self._lateness, self._timeout_s, self._then = work, data, lateness, timeout_s, then

    def wait(self) -> None:
        """See :class:`megappo.reshard.transport.Work`."""
        try:
            self._work.wait()
        except RuntimeError as error:
            late = "timed out" in str(error).lower()
            how = f"within {self._timeout_s:g} s" if late else "and is gone"
            raise TransferError(f"{self._lateness} {how} ({_last_line(error)})") from None
        if self._then is not None:
            self._then()


def _last_line(error: RuntimeError) -> str:
    return str(error).strip().splitlines()[-1].split("] ")[-1]


def _own_address(host: str, port: int) -> str:
    """The address of this machine on the way to another."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        return probe.getsockname()[0]
