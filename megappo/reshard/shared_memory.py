"""Messages between processes of one host: packed by the sender into memory that the receiver reads.

Each sender has a ring of buckets for all its receivers, and a connection to each. A byte over it says which bucket is
filled, another that it is free again; a process that dies closes its end.
"""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch

from megappo.reshard.gloo import GlooTransport
from megappo.reshard.transport import PATIENCE, Blocks, TransferError, pack, unpack

FOLDER = "/dev/shm"
"""Where processes of one host find each other's doors, and those of others cannot."""

RANK_BYTES = 4


class Line:
    """This rank's end of a connection to another process of the host."""

    def __init__(self, connection: socket.socket, who: str, limit_s: float) -> None:
        """Take it.

        Args:
            who: the other one, for people.
            limit_s: on each wait, in seconds.
        """
        connection.settimeout(limit_s)
        self._connection, self._who, self._limit_s = connection, who, limit_s

    def say(self, bucket: int) -> None:
        """Name a bucket; returns at once.

        Raises:
            TransferError: the other one is gone.
        """
        try:
            self._connection.sendall(bytes([bucket]))
        except OSError as error:
            raise TransferError(f"{self._who} took nothing and is gone ({error.strerror})") from None

    def hear(self, otherwise: str, patience: float) -> int:
        """Wait for the other one to name a bucket.

        Args:
            otherwise: what it failed to do if it does not.
            patience: times the limit that it may take.

        Raises:
            TransferError: it is gone, or took longer than the limit.
        """
        self._connection.settimeout(self._limit_s * patience)
        try:
            said = self._connection.recv(1)
        except TimeoutError:
            raise TransferError(f"{self._who} {otherwise} within {self._limit_s:g} s") from None
        except OSError as error:
            raise TransferError(f"{self._who} {otherwise} and is gone ({error.strerror})") from None
        if not said:
            raise TransferError(f"{self._who} {otherwise} and is gone (it closed its connection)")
        return said[0]


class SharedMemory:
    """This rank's ring, and those that it reads."""

    def __init__(
        self, ring: torch.Tensor | None, receivers: Mapping[int, Line], senders: Mapping[int, tuple[Line, torch.Tensor]]
    ) -> None:
        """Take the rings; see :func:`open_rings`.

        Args:
            ring: uint8 [messages under way, bucket]; None if there is nobody to send to.
            receivers: by rank.
            senders: with their rings, by rank.
        """
        self._ring, self._receivers, self._senders = ring, receivers, senders
        self._turn = 0

    def finish(self) -> None:
        """Messages that were waited for are here."""

    def abort(self) -> None:
        """Peers notice when the connections are gone, with this."""

    def tends(self, blocks: Blocks) -> bool:
        """All messages: they are copied on both sides."""
        return True

    def send(self, blocks: Blocks, to: int, patience: float = PATIENCE) -> Sent:
        """Start to send; see :class:`megappo.reshard.transport.Transport`."""
        assert self._ring is not None, "open_rings was told of no receiver"
        bucket, self._turn = self._turn, (self._turn + 1) % len(self._ring)  # free again: no more are under way
        pack(blocks, self._ring[bucket])
        self._receivers[to].say(bucket)
        return Sent(self._receivers[to], patience)

    def receive(self, blocks: Blocks, source: int, patience: float = 1.0) -> Coming:
        """Start to receive; see :class:`megappo.reshard.transport.Transport`."""
        return Coming(*self._senders[source], blocks, patience)


class Sent(NamedTuple):
    """A message in a bucket of this rank's ring."""

    line: Line
    patience: float

    def wait(self) -> None:
        """See :class:`megappo.reshard.transport.Work`."""
        self.line.hear("took nothing", self.patience)


class Coming(NamedTuple):
    """A message in a bucket of its sender's ring, or not there yet."""

    line: Line
    ring: torch.Tensor
    blocks: Blocks
    patience: float

    def wait(self) -> None:
        """See :class:`megappo.reshard.transport.Work`."""
        bucket = self.line.hear("sent nothing", self.patience)
        unpack(self.ring[bucket], self.blocks)
        self.line.say(bucket)


def open_rings(
    gloo: GlooTransport, receivers: Collection[int], senders: Collection[int], buckets: int, bucket_bytes: int
) -> tuple[SharedMemory, set[int]]:
    """Make this rank's ring and open others'.

    Args:
        gloo: the group of all ranks, over whose store they meet.
        receivers, senders: ranks of this host that this one sends to and receives from. They call this too.
        buckets: of a ring: as many as messages are under way at most.

    Returns:
        The transport, and the ranks that it reaches: not those with whom the host's memory is too small, or is not
        shared (containers).
    """
    store, rank = gloo.store, gloo.rank

    def line(connection: socket.socket, peer: int) -> Line:
        return Line(connection, gloo.describe(peer), gloo.timeout_s)

    memory = _make(buckets * bucket_bytes) if receivers else None
    with tempfile.TemporaryDirectory(prefix="megappo-", dir=FOLDER) as folder, socket.socket(socket.AF_UNIX) as door:
        if memory is not None:
            door.bind(os.path.join(folder, "door"))
            door.listen(len(receivers))
        store.set(f"ring/{rank}", door.getsockname())  # empty without a ring
        calls = {sender: _call(store.get(f"ring/{sender}").decode(), rank) for sender in sorted(senders)}
        for sender, call in calls.items():
            store.set(f"ring/{sender}/{rank}", "open" if call else "not")
        opened = {receiver for receiver in receivers if store.get(f"ring/{rank}/{receiver}") == b"open"}
        to = {peer: line(call, peer) for peer, call in (_answer(door, memory) for _ in opened)}
    from_ = {
        peer: (line(call, peer), _map(_given(call, gloo.describe(peer)), buckets))
        for peer, call in calls.items()
        if call
    }
    reached = (opened | from_.keys()) - (set(receivers) - opened) - (set(senders) - from_.keys())
    return SharedMemory(None if memory is None else _map(memory, buckets), to, from_), reached


def _make(size: int) -> int | None:
    """A handle of new memory that can be handed to other processes; None if there is no room."""
    handle = os.memfd_create("megappo")
    try:
        os.posix_fallocate(handle, 0, size)  # else a full one would be noticed by a fatal signal later
        return handle
    except OSError:
        os.close(handle)
        return None


def _map(handle: int, buckets: int) -> torch.Tensor:
    """The memory of a handle, which is closed."""
    memory = mmap.mmap(handle, 0)
    os.close(handle)
    return torch.frombuffer(memory, dtype=torch.uint8).view(buckets, -1)


def _call(door: str, rank: int) -> socket.socket | None:
    """Connect to another process, and say who calls; None if it is out of reach."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(door)
        connection.sendall(rank.to_bytes(RANK_BYTES, "big"))
        return connection
    except OSError:
        connection.close()
        return None


def _answer(door: socket.socket, memory: int | None) -> tuple[int, socket.socket]:
    """Let a process that has called in, and give it the memory; its rank, and the connection."""
    assert memory is not None
    connection, _ = door.accept()
    rank = int.from_bytes(connection.recv(RANK_BYTES, socket.MSG_WAITALL), "big")
    socket.send_fds(connection, [bytes(1)], [memory])
    return rank, connection


def _given(connection: socket.socket, who: str) -> int:
    """The handle that comes over a new connection."""
    _, handles, _, _ = socket.recv_fds(connection, 1, 1)
    if not handles:
        raise TransferError(f"{who} gave no memory and is gone")
    return handles[0]
