"""Messages between processes of one host: packed by the sender into memory that the receiver reads.

Each sender has a ring of buckets for all its receivers. A note over gloo says that a bucket is filled, another that
it is free again; so a process that dies or stalls is noticed as everywhere else.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Mapping
from contextlib import suppress

import torch

from megappo.reshard.gloo import FREE, READY, GlooTransport, GlooWork
from megappo.reshard.transport import Blocks, pack, unpack

FOLDER = "/dev/shm"


class SharedMemory:
    """This rank's ring, and those that it reads."""

    def __init__(self, gloo: GlooTransport, own: torch.Tensor | None, others: Mapping[int, torch.Tensor]) -> None:
        """Take the rings; see :func:`open_rings`.

        Args:
            gloo: carries the notes.
            own, others: uint8 [messages under way, bucket]; the others' by rank.
        """
        self._gloo, self._own, self._others = gloo, own, others
        self._turn = 0

    def finish(self) -> None:
        """Messages that were waited for are here."""

    def tends(self, blocks: Blocks) -> bool:
        """All messages: they are copied on both sides."""
        return True

    def send(self, blocks: Blocks, to: int) -> Sent:
        """Start to send; see :class:`megappo.reshard.transport.Transport`."""
        assert self._own is not None, "open_rings was told of no receiver"
        slot, self._turn = self._turn, (self._turn + 1) % len(self._own)  # free again: no more are under way
        pack(blocks, self._own[slot])
        free = self._gloo.expect(torch.empty(1, dtype=torch.int64), to, FREE)
        return Sent(self._gloo.post(torch.tensor([slot]), to, READY), free)

    def receive(self, blocks: Blocks, source: int) -> GlooWork:
        """Start to receive; see :class:`megappo.reshard.transport.Transport`."""
        slot = torch.empty(1, dtype=torch.int64)

        def done() -> None:
            unpack(self._others[source][int(slot)], blocks)
            self._gloo.post(torch.zeros(1, dtype=torch.int64), source, FREE).wait()  # at once: it is expected

        return self._gloo.expect(slot, source, READY, then=done)


class Sent:
    """A message in a bucket of the ring."""

    def __init__(self, ready: GlooWork, free: GlooWork) -> None:
        self._ready, self._free = ready, free

    def wait(self) -> None:
        """See :class:`megappo.reshard.transport.Work`."""
        self._ready.wait()
        self._free.wait()


def open_rings(
    gloo: GlooTransport, receivers: Collection[int], senders: Collection[int], buckets: int, bucket_bytes: int
) -> tuple[SharedMemory, set[int]]:
    """Make this rank's ring and open others'.

    Args:
        receivers, senders: ranks of this host that this one sends to and receives from. They call this too.
        buckets: of a ring: as many as messages are under way at most.

    Returns:
        The transport, and the ranks that it reaches: not those with whom the host's shared memory is too small, or is
        not shared (containers).
    """
    store, rank = gloo.store, gloo.rank
    path = _make(buckets * bucket_bytes) if receivers else ""
    if receivers:
        store.set(f"ring/{rank}", f"{path}:{bucket_bytes}")
    others = {}
    for sender in sorted(senders):
        name, _, size = store.get(f"ring/{sender}").decode().rpartition(":")
        if name and os.path.exists(name):
            others[sender] = _map(name, buckets, int(size))
        store.set(f"ring/{sender}/{rank}", "open" if sender in others else "not")
    opened = {receiver for receiver in receivers if store.get(f"ring/{rank}/{receiver}") == b"open"}
    own = _map(path, buckets, bucket_bytes) if path else None
    if path:
        os.unlink(path)  # all have it open; the memory goes with the last of them, however they end
    return SharedMemory(gloo, own, others), opened | others.keys()


def _make(size: int) -> str:
    """The path of a new file of shared memory; empty if there is no room."""
    with suppress(OSError):
        handle, path = tempfile.mkstemp(prefix="megappo-", dir=FOLDER)
        try:
            os.posix_fallocate(handle, 0, size)  # else a full one would be noticed by a fatal signal later
            return path
        except OSError:
            os.unlink(path)
        finally:
            os.close(handle)
    return ""


def _map(path: str, buckets: int, bucket_bytes: int) -> torch.Tensor:
    ring = torch.from_file(path, shared=True, size=buckets * bucket_bytes, dtype=torch.uint8)
    return ring.view(buckets, bucket_bytes)
