"""Messages between GPUs over NCCL, in communicators of their own that leave every other group alone.

Each two ranks that talk have a communicator of two, made when they first do: one for all would need all to come, and
two ranks of it could not send several blocks in one launch. A rank's communicators share its channels, so that the
memory they take is bounded (:mod:`megappo.layout.communicators`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from megappo.reshard.gloo import GlooTransport
from megappo.reshard.nccl_pairs import Verb, abort_pairs, launch, make_pair
from megappo.reshard.packing import PackedMessage, Packing
from megappo.reshard.transport import PATIENCE, Blocks, Buckets, TransferError
from megappo.time_limit import within

POLL_S = 2e-5

AHEAD = 8
"""Messages that the host launches before it has seen the first of them arrive. A GPU takes about a thousand launches:
with more, a launch would itself wait for the peer, without a limit."""

ABORT_S = 20.0
"""What ending communicators may take."""


class NcclTransport:
    """A message is one launch. Its large blocks go straight from parameter to parameter where they lie in one piece;
    those that do not, and all small ones together, by way of a bucket.

    The host runs ahead: packing, messages and unpacking follow each other on the device's streams, so that neither the
    link nor the buckets wait for Python. ``unfinished`` are the messages that the host has not seen arrive; it is no
    more than so many ``ahead``.
    """

    def __init__(
        self, gloo: GlooTransport, direct_bytes: int, device: torch.device, peers: int, ahead: int = AHEAD
    ) -> None:
        """Not collective: ranks meet when they first send.

        Args:
            gloo: the transfer group, whose meeting point and limit are used.
            direct_bytes: blocks of this size or more are not joined with others.
            device: this rank's.
            peers: ranks that this one will talk to.
            ahead: messages that the host need not have seen arrive when ``wait`` returns. Where it goes on to wait for
                the device's stream, with messages of other transports, there must be none: that wait has no limit.
        """
        self.timeout_s, self._describe = gloo.timeout_s, gloo.describe
        self.unfinished: deque[NcclWork] = deque()
        self._rank, self._store, self._direct_bytes, self._device = gloo.rank, gloo.store, direct_bytes, device
        self.ahead, self._peers = ahead, peers
        self._pairs: dict[tuple[int, Verb], Any] = {}
        self._packings: WeakKeyDictionary[Blocks, Packing] = WeakKeyDictionary()
        self._buckets = Buckets(0, lambda size: torch.empty(size, dtype=torch.uint8, device=device))
        self._byte = torch.zeros(1, dtype=torch.uint8, device=device)

    def tends(self, blocks: Blocks) -> bool:
        """All messages: each that is under way keeps a part of the GPU busy."""
        return True

    def send(self, blocks: Blocks, to: int, patience: float = PATIENCE) -> NcclWork:
        """Start to send; see :class:`megappo.reshard.transport.Transport`."""
        message = self._message(blocks)
        message.pack()
        return self._start("send", message, to, patience)

    def receive(self, blocks: Blocks, source: int, patience: float = 1.0) -> NcclWork:
        """Start to receive; see :class:`megappo.reshard.transport.Transport`."""
        return self._start("recv", self._message(blocks), source, patience)

    def give(self, bucket: torch.Tensor) -> None:
        """Take a bucket back."""
        self._buckets.give(bucket)

    def finish(self) -> None:
        """See :class:`megappo.reshard.transport.Transport`; the limit is on each message after the one before."""
        self.settle(0)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # the last are unpacked too
        self._buckets.drop()  # between syncs the device has other uses for their memory

    def settle(self, most: int) -> None:
        """Wait for the oldest messages until so many are left.

        Raises:
            TransferError: one will not arrive.
        """
        arrived: list[NcclWork] = []
        while len(self.unfinished) > most:
            work = self.unfinished.popleft()
            if not work.is_over():
                self._see_success(arrived)  # before others are waited for, which may wait for the same peer
                work.arrive()
            arrived.append(work)
        self._see_success(arrived)

    def _see_success(self, works: list[NcclWork]) -> None:
        """Raise what went wrong with messages that are no longer under way, and empty the list.

        Of one that failed, torch first ends the communicator, which has no limit of its own. One thread looks at them
        all: to start it takes as long as a small message.
        """
        if not works:
            return
        seen: list[NcclWork] = []

        def look() -> None:
            for work in works:
                seen.append(work)
                work.succeed()

        try:
            self._within(ABORT_S, look)
        except TimeoutError:
            raise seen[-1].late.gone(f"its communicator could not be ended within {ABORT_S:g} s") from None
        works.clear()

    def abort(self) -> None:
        """See :class:`megappo.reshard.transport.Transport`: kernels that wait for a peer would keep the GPU busy."""
        pairs = list(dict.fromkeys(self._pairs.values()))
        self._pairs.clear()
        self.unfinished.clear()
        self._buckets.drop()
        abort_pairs(pairs, ABORT_S)

    def _within(self, seconds: float, function: Callable[[], Any]) -> None:
        """Call a function that may hang; see :func:`megappo.time_limit.within`."""

        def call() -> None:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a thread's own
            function()

        within(seconds, call)

    def _message(self, blocks: Blocks) -> PackedMessage:
        packing = self._packings.get(blocks)
        if packing is None:
            packing = self._packings[blocks] = Packing(blocks, self._direct_bytes)
        return packing.message(self._buckets.take(packing.nbytes) if packing.nbytes else None)

    def _start(self, verb: Verb, message: PackedMessage, peer: int, patience: float) -> NcclWork:
        late = _Lateness(self._describe(peer), verb, self.timeout_s, patience)
        with late:
            if (peer, verb) not in self._pairs:
                self._connect(peer, verb, late)
            work = launch(self._pairs[peer, verb], verb, message.pieces, int(peer > self._rank))
            return NcclWork(self, work, message, late)
        raise AssertionError

    def _connect(self, peer: int, verb: Verb, late: _Lateness) -> None:
        """Have a communicator of two, over which messages can be sent (or received) at once."""
        low, high = sorted((self._rank, peer))
        opposite: Verb = "recv" if verb == "send" else "send"
        other, known = int(peer == high), self._pairs.get((peer, opposite))
        if known is None:
            store = dist.PrefixStore(f"megappo-nccl/{low}-{high}", self._store)
            store.set(f"here/{self._rank}", str(self._peers))
            store.wait([f"here/{peer}"], timedelta(seconds=late.after_s))
            pair = make_pair(store, 1 - other, max(self._peers, int(store.get(f"here/{peer}"))))
        else:
            pair = known
        self._pairs[peer, verb] = pair  # from now on it can be aborted

        def open_it() -> None:
            if known is None:
                pair.eager_connect_single_device(self._device)
            launch(pair, verb, [self._byte], other)  # connections are made by what first needs them

        self._within(late.after_s, open_it)


class NcclWork:
    """A message under way."""

    def __init__(self, transport: NcclTransport, work: Any, message: PackedMessage, late: _Lateness) -> None:
        self._transport, self._work, self.late = transport, work, late
        self._message: PackedMessage | None = message

    def wait(self) -> None:
        """Let the current stream go on after it; see :class:`megappo.reshard.transport.Work`."""
        message, self._message = self._message, None  # its bucket is the transport's again
        assert message is not None
        with self.late:
            self._work.synchronize()
        if self.late.verb == "recv":
            message.unpack()
        if message.bucket is not None:
            self._transport.give(message.bucket)  # what is next written there comes later on the same stream
        self._transport.unfinished.append(self)
        self._transport.settle(self._transport.ahead)

    def is_over(self) -> bool:
        """Whether it has arrived, or failed."""
        with self.late:
            return bool(self._work.is_completed())
        raise AssertionError

    def arrive(self) -> None:
        """Return once it has arrived, or failed.

        Raises:
            TransferError: neither came within the limit, from now on.
        """
        deadline = time.monotonic() + self.late.after_s
        while not self.is_over():
            if time.monotonic() > deadline:
                raise self.late.error()
            time.sleep(POLL_S)

    def succeed(self) -> None:
        """Return at once if it has arrived.

        Raises:
            TransferError: it failed.
        """
        with self.late:
            self._work.wait()


class _Lateness:
    """Around what waits for a peer, which is late after so many seconds: its failure says who, and how."""

    def __init__(self, who: str, verb: Verb, limit_s: float, patience: float) -> None:
        self.verb, self._limit_s, self.after_s = verb, limit_s, limit_s * patience
        self._what = f"{who} {'took' if verb == 'send' else 'sent'} nothing"

    def error(self) -> TransferError:
        return TransferError(f"{self._what} within {self._limit_s:g} s")

    def gone(self, why: object) -> TransferError:
        return TransferError(f"{self._what} and is gone ({why})")

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (dist.DistStoreError, TimeoutError)):  # it did not come, or did not connect
            raise self.error() from None
        if isinstance(error, dist.DistNetworkError):
            raise TransferError(f"{self._what}, and the meeting point of all ranks is gone ({error})") from None
        if isinstance(error, dist.DistBackendError):
            raise self.gone(error) from None
