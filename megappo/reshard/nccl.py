"""Messages between GPUs over NCCL, in communicators of their own that leave every other group alone.

Each two ranks that talk have a communicator of two, made when they first do: one for all would need all to come, and
two ranks of it could not send several blocks in one launch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megappo.reshard.gloo import GlooTransport
from megappo.reshard.transport import SENDERS_WAIT, Blocks, Buckets, TransferError, parts, size_of

POLL_S = 2e-5


class NcclTransport:
    """A message is one launch. Its large blocks go straight from parameter to parameter where they lie in one piece;
    those that do not, and all small ones together, by way of a bucket.

    The host runs ahead: packing, messages and unpacking follow each other on the device's streams, so that neither the
    link nor the buckets wait for Python. ``unfinished`` are the messages that the host has not seen arrive.
    """

    def __init__(self, gloo: GlooTransport, direct_bytes: int, device: torch.device) -> None:
        """Not collective: ranks meet when they first send.

        Args:
            gloo: the transfer group, whose meeting point and limit are used.
            direct_bytes: blocks of this size or more are not joined with others.
            device: this rank's.
        """
        self.timeout_s, self._describe = gloo.timeout_s, gloo.describe
        self.unfinished: list[NcclWork] = []
        self._rank, self._store, self._direct_bytes = gloo.rank, gloo.store, direct_bytes
        self._pairs: dict[int, Any] = {}
        self._buckets = Buckets(0, lambda size: torch.empty(size, dtype=torch.uint8, device=device))

    def tends(self, blocks: Blocks) -> bool:
        """All messages: each that is under way keeps a part of the GPU busy."""
        return True

    def send(self, blocks: Blocks, to: int) -> NcclWork:
        """Start to send; see :class:`megappo.reshard.transport.Transport`."""
        message = self._message(blocks)
        message.pack()
        return self._start("send", message, to, f"{self._describe(to)} took nothing")

    def receive(self, blocks: Blocks, source: int) -> NcclWork:
        """Start to receive; see :class:`megappo.reshard.transport.Transport`."""
        return self._start("recv", self._message(blocks), source, f"{self._describe(source)} sent nothing")

    def give(self, bucket: torch.Tensor) -> None:
        """Take a bucket back."""
        self._buckets.give(bucket)

    def finish(self) -> None:
        """See :class:`megappo.reshard.transport.Transport`; the limit is on each message after the one before."""
        for work in self.unfinished:
            work.finish()
        for last in {work.pair: work for work in self.unfinished}.values():
            last.join()  # raises what went wrong, which a communicator does not survive
        self.unfinished.clear()

    def _message(self, blocks: Blocks) -> _Message:
        """What travels for these blocks; both ends cut it in the same way, whatever they pack."""
        small = [block for block in blocks if block.nbytes < self._direct_bytes]
        large = [block for block in blocks if block.nbytes >= self._direct_bytes]
        packed = small + [block for block in large if not block.is_contiguous()]
        if not packed:
            return _Message([_bytes(block) for block in large], [], [], None)
        bucket = self._buckets.take(size_of(packed))
        places = [part for part, _ in parts(packed, bucket)]
        place_of = dict(zip(map(id, packed), places, strict=True))
        together = [bucket[: size_of(small)]] if small else []
        alone = [_bytes(place_of.get(id(block), block)) for block in large]
        return _Message(together + alone, packed, places, bucket)

    def _start(self, verb: str, message: _Message, peer: int, lateness: str) -> NcclWork:
        pair, other = self._pair(peer), int(peer > self._rank)
        start = getattr(pair, verb)
        pair._start_coalescing()
        for piece in message.pieces:
            start([piece], other, 0)
        return NcclWork(self, pair, pair._end_coalescing(), lateness, message, unpacks=verb == "recv")

    def _pair(self, peer: int) -> Any:
        if peer not in self._pairs:
            nccl: Any = dist.ProcessGroupNCCL
            options = nccl.Options()
            # Torch's own watchdog would end the whole process: ours is first, and names the peer.
            options._timeout = timedelta(seconds=2 * self.timeout_s + 60)
            low, high = sorted((self._rank, peer))
            store = dist.PrefixStore(f"megappo-nccl/{low}-{high}", self._store)
            self._pairs[peer] = nccl(store, int(self._rank == high), 2, options)
        return self._pairs[peer]


class _Message:
    """Pieces of memory that travel, uint8; and the blocks that are packed, with their places in the bucket, if any."""

    def __init__(
        self,
        pieces: Sequence[torch.Tensor],
        blocks: Sequence[torch.Tensor],
        places: Sequence[torch.Tensor],
        bucket: torch.Tensor | None,
    ) -> None:
        self.pieces, self.bucket = pieces, bucket
        self._blocks, self._places = list(blocks), list(places)

    def pack(self) -> None:
        if self._blocks:
            torch._foreach_copy_(self._places, self._blocks)

    def unpack(self) -> None:
        if self._blocks:
            torch._foreach_copy_(self._blocks, self._places)


class NcclWork:
    """A message under way."""

    def __init__(
        self, transport: NcclTransport, pair: Any, work: Any, lateness: str, message: _Message, unpacks: bool
    ) -> None:
        self.pair = pair
        self._transport, self._work, self._lateness = transport, work, lateness
        self._message, self._unpacks = message, unpacks

    def wait(self) -> None:
        """Let the current stream go on after it; see :class:`megappo.reshard.transport.Work`."""
        self.join()
        self._transport.unfinished.append(self)
        if self._unpacks:
            self._message.unpack()
        if self._message.bucket is not None:
            self._transport.give(self._message.bucket)  # what is next written there comes later on the same stream

    def finish(self) -> None:
        """Return once it has truly arrived, or failed, which :meth:`join` raises.

        Raises:
            TransferError: it has not within the limit, from now on.
        """
        limit_s = self._transport.timeout_s * (1 if self._unpacks else SENDERS_WAIT)
        deadline = time.monotonic() + limit_s
        while not self._work.is_completed():
            if time.monotonic() > deadline:
                self.pair.abort()
                raise TransferError(f"{self._lateness} within {self._transport.timeout_s:g} s")
            time.sleep(POLL_S)

    def join(self) -> None:
        """Let the current stream go on after it.

        Raises:
            TransferError: the peer is gone.
        """
        try:
            self._work.wait()
        except dist.DistBackendError as error:
            raise TransferError(f"{self._lateness} and is gone ({error})") from None


def _bytes(piece: torch.Tensor) -> torch.Tensor:
    return piece.view(-1).view(torch.uint8)
