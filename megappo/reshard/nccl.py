"""Messages between GPUs over NCCL, in communicators of their own that leave every other group alone.

Each two ranks that talk have a communicator of two, made when they first do: one for all would need all to come, and
two ranks of it could not send several blocks in one launch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from megappo.reshard.gloo import GlooTransport
from megappo.reshard.transport import SENDERS_WAIT, Blocks, Buckets, TransferError, size_of

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
        self._packings: WeakKeyDictionary[Blocks, _Packing] = WeakKeyDictionary()
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
        following = [*(work.pair for work in self.unfinished[1:]), None]
        for work, pair in zip(self.unfinished, following, strict=False):
            work.finish()
            if pair is not work.pair:
                work.join()  # raises what went wrong, which a communicator does not survive
        self.unfinished.clear()
        self._buckets.drop()  # between syncs the device has other uses for their memory

    def _message(self, blocks: Blocks) -> _Message:
        packing = self._packings.get(blocks)
        if packing is None:
            packing = self._packings[blocks] = _Packing(blocks, self._direct_bytes)
        return packing.message(self._buckets.take(packing.nbytes) if packing.nbytes else None)

    def _start(self, verb: str, message: _Message, peer: int, lateness: str) -> NcclWork:
        limit_s = self.timeout_s * (SENDERS_WAIT if verb == "send" else 1)
        pair, other = self._pair(peer, limit_s, lateness), int(peer > self._rank)
        start = getattr(pair, verb)
        pair._start_coalescing()
        for piece in message.pieces:
            start([piece], other, 0)
        return NcclWork(self, pair, pair._end_coalescing(), lateness, message, limit_s, unpacks=verb == "recv")

    def _pair(self, peer: int, limit_s: float, lateness: str) -> Any:
        if peer not in self._pairs:
            low, high = sorted((self._rank, peer))
            store = dist.PrefixStore(f"megappo-nccl/{low}-{high}", self._store)
            self._meet(store, peer, limit_s, lateness)
            nccl: Any = dist.ProcessGroupNCCL
            options = nccl.Options()
            # Torch's own watchdog would end the whole process: ours is first, and names the peer.
            options._timeout = timedelta(seconds=2 * self.timeout_s + 60)
            self._pairs[peer] = nccl(store, int(self._rank == high), 2, options)
        return self._pairs[peer]

    def _meet(self, store: dist.Store, peer: int, limit_s: float, lateness: str) -> None:
        """Wait for the other one: NCCL would do so without a limit of ours, where nothing can be aborted yet."""
        try:
            store.set(f"here/{self._rank}", "")
            store.wait([f"here/{peer}"], timedelta(seconds=limit_s))
        except dist.DistStoreError:
            raise TransferError(f"{lateness} within {self.timeout_s:g} s") from None
        except dist.DistNetworkError as error:
            raise TransferError(f"{lateness}, and the meeting point of all ranks is gone ({error})") from None


class _Packing:
    """What travels of a message's blocks from where it lies, and what by way of a bucket.

    All small blocks are packed, and those that do not lie in one piece. Both ends cut a message into the same pieces,
    whatever they pack: all small blocks are one, each large block is one.
    """

    def __init__(self, blocks: Blocks, direct_bytes: int) -> None:
        small = [block for block in blocks if block.nbytes < direct_bytes]
        large = [block for block in blocks if block.nbytes >= direct_bytes]
        strided = [block for block in large if not block.is_contiguous()]
        packed = small + strided
        self.nbytes, self._small, self._small_bytes = size_of(packed), len(small), size_of(small)
        self._dtype, self._sizes = blocks[0].dtype, [block.numel() for block in packed]
        self._packed = [block.view(-1) if block.is_contiguous() else block for block in packed]
        self._large = [_bytes(block) if block.is_contiguous() else None for block in large]

    def message(self, bucket: torch.Tensor | None) -> _Message:
        """It, by way of a bucket, if it needs one."""
        places: list[torch.Tensor] = []
        if bucket is not None:
            cuts = bucket[: self.nbytes].view(self._dtype).split(self._sizes)
            pairs = zip(cuts, self._packed, strict=True)
            places = [cut.view(block.shape) if block.dim() > 1 else cut for cut, block in pairs]
        strided = iter(places[self._small :])
        pieces = [_bytes(next(strided)) if piece is None else piece for piece in self._large]
        together = [] if bucket is None or not self._small_bytes else [bucket[: self._small_bytes]]
        return _Message(together + pieces, self._packed, places, bucket)


class _Message(NamedTuple):
    """Pieces of memory that travel, uint8; and the blocks that are packed, with their places in the bucket, if any."""

    pieces: Sequence[torch.Tensor]
    blocks: list[torch.Tensor]
    places: list[torch.Tensor]
    bucket: torch.Tensor | None

    def pack(self) -> None:
        if self.blocks:
            torch._foreach_copy_(self.places, self.blocks)

    def unpack(self) -> None:
        if self.blocks:
            torch._foreach_copy_(self.blocks, self.places)


class NcclWork:
    """A message under way."""

    def __init__(
        self,
        transport: NcclTransport,
        pair: Any,
        work: Any,
        lateness: str,
        message: _Message,
        limit_s: float,
        unpacks: bool,
    ) -> None:
        self.pair = pair
        self._transport, self._work, self._lateness = transport, work, lateness
        self._message, self._limit_s, self._unpacks = message, limit_s, unpacks

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
        deadline = time.monotonic() + self._limit_s
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
