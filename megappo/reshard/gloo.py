"""Messages over gloo, in a group of its own that leaves every other process group alone.

Blocks in host memory that lie in one piece go straight from parameter to parameter. Others are packed, once for all
replicas that want the same while it is under way; those on a GPU are staged through pinned host memory.
"""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from megappo.reshard.transport import PATIENCE, Blocks, Buckets, TransferError, in_one_piece, pack, size_of, unpack

DATA, READY, FREE, SUMS = range(4)
"""Kinds of traffic between two ranks; each keeps its own order."""

FILES = 16
"""That a rank opens besides one for each other rank."""
NAMED = 4
"""Most ranks that a message names."""


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
            timeout_s: limit on joining, once the meeting point has answered, and on each message, in seconds.
            bucket_bytes: size of the largest message.
            describe: names a rank for people.

        Raises:
            TransferError: ranks have not come within the limit, or the meeting point is gone.
            OSError: this process may not open a file for each rank.
        """
        _allow_files(world + FILES)
        timeout = timedelta(seconds=timeout_s)
        self.rank, self.timeout_s, self.describe = rank, timeout_s, cache(describe)
        try:
            self.store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
            self.store.set(f"joins/{rank}", "")
        except dist.DistError as error:
            where = f"the meeting point of all ranks, {host}:{port},"
            raise TransferError(f"{where} is out of reach ({_reason(error)})") from None
        self._buckets = Buckets(bucket_bytes)
        self._pinned = Buckets(bucket_bytes, lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True))
        self._packed: dict[Hashable, _Packed] = {}
        self._late = cache(lambda peer, failed, times: _Lateness(f"{describe(peer)} {failed}", timeout_s, times))
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timeout
        # Left to itself gloo binds to what the host's own name resolves to, which on many machines is the loopback.
        # Not lazy_init: its first send or receive may wait for the other rank's, then without a limit (torch 2.13).
        options._devices = [gloo.create_device(hostname=_own_address(host, port))]
        try:
            self._group: Any = gloo(dist.PrefixStore("megappo-transfer", self.store), rank, world, options)
        except RuntimeError as error:
            raise self._unmet({rank: f"joins/{rank}" for rank in range(world)}, error) from None

    def told(self, key: str, by: int) -> bytes:
        """Wait for what a rank says at the meeting point.

        Raises:
            TransferError: it said nothing within the limit.
        """
        try:
            return self.store.get(key)
        except RuntimeError as error:
            raise self._unmet({by: key}, error) from None

    def _unmet(self, keys: Mapping[int, str], error: RuntimeError) -> TransferError:
        """What to raise where ranks were waited for, each with a key: it names those that have not left theirs."""
        try:
            missing = [rank for rank, key in keys.items() if not self.store.check([key])]
        except RuntimeError:
            return TransferError(f"the meeting point of all ranks is gone ({_reason(error)})")
        if not missing:
            return TransferError(f"all ranks came, but could not connect ({_reason(error)})")
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        who = ", ".join(map(self.describe, missing[:NAMED])) + more
        return TransferError(f"{who} did not join the transfer group within {self.timeout_s:g} s")

    def finish(self) -> None:
        """Messages that were waited for are here."""

    def abort(self) -> None:
        """Peers notice when the group is gone, which others may use until then."""

    def tends(self, blocks: Blocks) -> bool:
        """See :class:`megappo.reshard.transport.Transport`."""
        return not (blocks[0].is_cpu and in_one_piece(blocks))

    def send(self, blocks: Blocks, to: int, patience: float = PATIENCE) -> GlooWork:
        """Start to send; see :class:`megappo.reshard.transport.Transport`."""
        if not self.tends(blocks):
            return self.post(blocks[0], to, DATA, patience)
        key = tuple((block.data_ptr(), block.shape, block.stride()) for block in blocks)
        packed = self._packed.get(key)
        if packed is None:
            packed = self._packed[key] = self._pack(blocks)
        packed.readers += 1

        def gone() -> None:
            packed.readers -= 1
            if not packed.readers:
                del self._packed[key]
                packed.owner.give(packed.bucket)

        return self.post(packed.data, to, DATA, patience, then=gone)

    def receive(self, blocks: Blocks, source: int, patience: float = 1.0) -> GlooWork:
        """Start to receive; see :class:`megappo.reshard.transport.Transport`."""
        if not self.tends(blocks):
            return self.expect(blocks[0], source, DATA, patience)
        on_host = blocks[0].is_cpu
        buckets = self._buckets if on_host else self._pinned
        bucket = buckets.take()
        data = bucket[: size_of(blocks)]

        def done() -> None:
            unpack(data if on_host else data.to(blocks[0].device), blocks)
            buckets.give(bucket)

        return self.expect(data, source, DATA, patience, then=done)

    def _pack(self, blocks: Blocks) -> _Packed:
        on_host = blocks[0].is_cpu
        buckets = self._buckets if on_host else self._pinned
        bucket = buckets.take()
        if on_host:
            return _Packed(buckets, bucket, pack(blocks, bucket))
        data = bucket[: size_of(blocks)]  # packed there: one copy over the bus instead of many
        data.copy_(torch.cat([block.reshape(-1) for block in blocks]).view(torch.uint8))
        return _Packed(buckets, bucket, data)

    def post(
        self,
        data: torch.Tensor,
        to: int,
        kind: int,
        patience: float = PATIENCE,
        then: Callable[[], None] | None = None,
    ) -> GlooWork:
        """Start to send a contiguous tensor in host memory; ``then`` is called by ``wait`` when it has gone.

        Raises:
            TransferError: the other one is gone already.
        """
        late = self._late(to, "took nothing", patience)
        with late:
            return GlooWork(self._group.send([data], to, kind), data, late, then)
        raise AssertionError

    def expect(
        self,
        data: torch.Tensor,
        source: int,
        kind: int,
        patience: float = 1.0,
        then: Callable[[], None] | None = None,
    ) -> GlooWork:
        """Start to receive into a contiguous tensor in host memory; ``then`` is called by ``wait`` when it is there.

        Raises:
            TransferError: the other one is gone already.
        """
        late = self._late(source, "sent nothing", patience)
        with late:
            return GlooWork(self._group.recv([data], source, kind), data, late, then)
        raise AssertionError


@dataclass
class _Packed:
    """A message in a bucket, on its way to so many ranks."""

    owner: Buckets
    bucket: torch.Tensor
    data: torch.Tensor
    readers: int = 0


class GlooWork:
    """A message under way; it keeps its tensor alive."""

    def __init__(self, work: Any, data: torch.Tensor, late: _Lateness, then: Callable[[], None] | None) -> None:
        self._work, self._data, self._late, self._then = work, data, late, then

    def wait(self) -> None:
        """See :class:`megappo.reshard.transport.Work`."""
        with self._late:
            self._work.wait(self._late.after)
        if self._then is not None:
            self._then()


class _Lateness:
    """Around what waits for another rank, which is late ``after`` a time: its failure says whom, and how long."""

    def __init__(self, what: str, limit_s: float, times: float) -> None:
        self._what, self._limit_s, self.after = what, limit_s, timedelta(seconds=limit_s * times)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            how = f"within {self._limit_s:g} s" if "timed out" in str(error).lower() else "and is gone"
            raise TransferError(f"{self._what} {how} ({_reason(error)})") from None


def _reason(error: RuntimeError) -> str:
    """The last line of what torch and gloo say, without where in their code."""
    return str(error).strip().splitlines()[-1].split("] ")[-1]


def _allow_files(count: int) -> None:
    """Let this process open so many files beyond those that it might already: gloo would end it at the limit.

    Raises:
        OSError: the host's own limit forbids it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY in (soft, hard):
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft + count, hard), hard))
    used = len(os.listdir("/proc/self/fd"))
    if used + count > hard:
        raise OSError(
            f"the transfer group takes {count} open files in this process, which has {used} and may have {hard}: raise "
            "the hard limit (ulimit -Hn)"
        )


def _own_address(host: str, port: int) -> str:
    """The address of this machine on the way to another."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        return probe.getsockname()[0]
