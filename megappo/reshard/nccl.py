"""Messages between GPUs over NCCL, in communicators of their own that leave every other group alone.

torch makes a communicator of two ranks for each pair that talks, when it first does.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megappo.reshard.gloo import GlooTransport
from megappo.reshard.transport import Blocks, Buckets, TransferError, flat, pack, size_of, unpack

POLL_S = 2e-5


class NcclTransport:
    """Blocks that lie in one piece go straight from parameter to parameter; others are packed on the device.

    The host runs ahead: packing, messages and unpacking follow each other on the device's streams, so that neither the
    link nor the buckets wait for Python. ``unfinished`` are the messages that the host has not seen arrive.
    """

    def __init__(self, gloo: GlooTransport, world: int, bucket_bytes: int, device: torch.device) -> None:
        """Not collective: ranks meet when they first send.

        Args:
            gloo: the transfer group, whose meeting point and limit are used.
            world: ranks of the transfer group.
            bucket_bytes: size of the largest message.
            device: this rank's.
        """
        self.timeout_s, self._describe = gloo.timeout_s, gloo.describe
        self.unfinished: list[tuple[Any, str]] = []
        self._buckets = Buckets(bucket_bytes, lambda size: torch.empty(size, dtype=torch.uint8, device=device))
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        # Torch's own watchdog would end the whole process: ours is first, and names the peer.
        options._timeout = timedelta(seconds=2 * self.timeout_s + 60)
        self.group: Any = nccl(dist.PrefixStore("megappo-nccl", gloo.store), gloo.rank, world, options)

    def tends(self, blocks: Blocks) -> bool:
        """All messages: each that is under way keeps a part of the GPU busy."""
        return True

    def send(self, blocks: Blocks, to: int) -> NcclWork:
        """Start to send; see :class:`megappo.reshard.transport.Transport`."""
        data, bucket = flat(blocks), None
        if data is None:
            bucket = self._buckets.take()
            data = pack(blocks, bucket)
        return NcclWork(self, self.group.send([data], to, 0), f"{self._describe(to)} took nothing", bucket)

    def receive(self, blocks: Blocks, source: int) -> NcclWork:
        """Start to receive; see :class:`megappo.reshard.transport.Transport`."""
        data, bucket = flat(blocks), None
        if data is None:
            bucket = self._buckets.take()
            data = bucket[: size_of(blocks)]
        work = self.group.recv([data], source, 0)
        return NcclWork(self, work, f"{self._describe(source)} sent nothing", bucket, blocks)

    def give(self, bucket: torch.Tensor) -> None:
        """Take a bucket back."""
        self._buckets.give(bucket)

    def finish(self) -> None:
        """See :class:`megappo.reshard.transport.Transport`; the limit is on each message after the one before."""
        for work, lateness in self.unfinished:
            deadline = time.monotonic() + self.timeout_s
            try:
                while not work.is_completed():
                    if time.monotonic() > deadline:
                        self.group.abort()
                        raise TransferError(f"{lateness} within {self.timeout_s:g} s")
                    time.sleep(POLL_S)
                work.wait()  # raises what went wrong
            except dist.DistBackendError as error:
                raise TransferError(f"{lateness} and is gone ({error})") from None
        self.unfinished.clear()


class NcclWork:
    """A message under way."""

    def __init__(
        self, transport: NcclTransport, work: Any, lateness: str, bucket: torch.Tensor | None, into: Blocks = ()
    ) -> None:
        self._transport, self._work, self._lateness = transport, work, lateness
        self._bucket, self._into = bucket, into

    def wait(self) -> None:
        """Let the current stream go on after it; see :class:`megappo.reshard.transport.Work`."""
        try:
            self._work.wait()
        except dist.DistBackendError as error:
            raise TransferError(f"{self._lateness} and is gone ({error})") from None
        self._transport.unfinished.append((self._work, self._lateness))
        if self._bucket is not None:
            if self._into:
                unpack(self._bucket, self._into)
            self._transport.give(self._bucket)  # what is next written there comes later on the same stream
