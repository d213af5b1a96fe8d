"""Messages between processes of one host: packed by the sender into memory that the receiver reads, on the host or on
the device of both.

Each sender has a ring of buckets for all its receivers, and a connection to each. A byte over it says which bucket is
filled, another that it is free again; a process that dies closes its end.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import NamedTuple

import torch

from megappo.reshard.gloo import GlooTransport
from megappo.reshard.rings import DeviceRing, HostRing, Ring, take_device_ring, take_host_ring
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
        self, ring: Ring | None, receivers: Mapping[int, Line], senders: Mapping[int, tuple[Line, torch.Tensor]]
    ) -> None:
        """Take the rings; see :func:`open_rings`.

        Args:
            ring: of as many buckets as messages are under way; None if there is nobody to send to.
            receivers: by rank.
            senders: with the buckets of their rings, by rank.
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
        buckets = self._ring.buckets
        bucket, self._turn = self._turn, (self._turn + 1) % len(buckets)  # free again: no more are under way
        pack(blocks, buckets[bucket])
        _settle(buckets)
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
        _settle(self.ring)
        self.line.say(bucket)


def _settle(ring: torch.Tensor) -> None:
    """Return once what was copied to or from it is there: the other process has streams of its own."""
    if ring.is_cuda:
        torch.cuda.current_stream(ring.device).synchronize()


def open_rings(
    gloo: GlooTransport,
    receivers: Collection[int],
    senders: Collection[int],
    buckets: int,
    bucket_bytes: int,
    device: torch.device,
) -> tuple[SharedMemory, set[int]]:
    """Make this rank's ring and open others'.

    Args:
        gloo: the group of all ranks, over whose store they meet.
        receivers, senders: ranks of this host that this one sends to and receives from. They call this too.
        buckets: of a ring: as many as messages are under way at most.
        device: where rings are; of a GPU, all these ranks share it.

    Returns:
        The transport, and the ranks that it reaches: not those with whom the host's memory is too small, or is not
        shared (containers).

    Raises:
        TransferError: one of them did not come within the limit, or is gone.
    """
    store, rank = gloo.store, gloo.rank

    def line(connection: socket.socket, peer: int) -> Line:
        return Line(connection, gloo.describe(peer), gloo.timeout_s)

    ring = _make(buckets, bucket_bytes, device) if receivers else None
    with tempfile.TemporaryDirectory(prefix="megappo-", dir=FOLDER) as folder, socket.socket(socket.AF_UNIX) as door:
        if ring is not None:
            door.bind(os.path.join(folder, "door"))
            door.listen(len(receivers))
        store.set(f"ring/{rank}", door.getsockname())  # empty without a ring
        calls = {sender: _call(gloo.told(f"ring/{sender}", by=sender).decode(), rank) for sender in sorted(senders)}
        for sender, call in calls.items():
            store.set(f"ring/{sender}/{rank}", "open" if call else "not")
        opened = {receiver for receiver in receivers if gloo.told(f"ring/{rank}/{receiver}", by=receiver) == b"open"}
        to = {peer: line(call, peer) for peer, call in (_answer(door, ring) for _ in opened)}

    def taken(call: socket.socket, peer: int) -> torch.Tensor:
        who = gloo.describe(peer)
        return take_host_ring(call, who, buckets) if device.type == "cpu" else take_device_ring(call, who)

    from_ = {peer: (line(call, peer), taken(call, peer)) for peer, call in calls.items() if call}
    reached = (opened | from_.keys()) - (set(receivers) - opened) - (set(senders) - from_.keys())
    return SharedMemory(ring, to, from_), reached


def _make(buckets: int, bucket_bytes: int, device: torch.device) -> Ring | None:
    """A ring of this process; None if the host has no room."""
    if device.type != "cpu":
        return DeviceRing(buckets, bucket_bytes, device)
    with suppress(OSError):
        return HostRing(buckets, bucket_bytes)
    return None


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


def _answer(door: socket.socket, ring: Ring | None) -> tuple[int, socket.socket]:
    """Let a process that has called in, and give it the ring; its rank, and the connection."""
    assert ring is not None
    connection, _ = door.accept()
    rank = int.from_bytes(connection.recv(RANK_BYTES, socket.MSG_WAITALL), "big")
    ring.give(connection)
    return rank, connection
