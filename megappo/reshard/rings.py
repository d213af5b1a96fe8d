"""Rings of buckets that a process shares with others of its host: in host memory, or on a device that they share."""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import struct
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from megappo.reshard.transport import TransferError

DEVICE_ARGUMENT = 6
"""Place of the device index in the arguments of ``rebuild_cuda_tensor``."""

_LENGTH = struct.Struct("!I")


class Ring(Protocol):
    """One's own.

    Attributes:
        buckets: uint8 [buckets, bytes of each].
    """

    buckets: torch.Tensor

    def give(self, connection: socket.socket) -> None:
        """Let the process at the other end read it."""


class HostRing:
    """In memory without a name, whose handle goes over the connection."""

    def __init__(self, buckets: int, bucket_bytes: int) -> None:
        """Take the memory now: else a full host would be noticed by a fatal signal later.

        Raises:
            OSError: there is no room.
        """
        self._handle = os.memfd_create("megappo")
        weakref.finalize(self, os.close, self._handle)
        os.posix_fallocate(self._handle, 0, buckets * bucket_bytes)
        self.buckets = _mapped(self._handle, buckets)

    def give(self, connection: socket.socket) -> None:
        """See :class:`Ring`."""
        socket.send_fds(connection, [bytes(1)], [self._handle])


class DeviceRing:
    """On a device, opened by CUDA IPC."""

    def __init__(self, buckets: int, bucket_bytes: int, device: torch.device) -> None:
        """Take the memory."""
        self.buckets = torch.empty(buckets, bucket_bytes, dtype=torch.uint8, device=device)

    def give(self, connection: socket.socket) -> None:
        """See :class:`Ring`."""
        said = pickle.dumps(reduce_tensor(self.buckets)[1])
        connection.sendall(_LENGTH.pack(len(said)) + said)


def take_host_ring(connection: socket.socket, who: str, buckets: int) -> torch.Tensor:
    """The buckets of another process's :class:`HostRing`.

    Raises:
        TransferError: it is gone, or took longer than the connection's limit.
    """
    with _limited(connection, who):
        _, handles, _, _ = socket.recv_fds(connection, 1, 1)
    if not handles:
        raise TransferError(f"{who} gave no memory and is gone")
    try:
        return _mapped(handles[0], buckets)
    finally:
        os.close(handles[0])


def take_device_ring(connection: socket.socket, who: str) -> torch.Tensor:
    """The buckets of another process's :class:`DeviceRing`, on this one's current device, which is the same.

    Raises:
        TransferError: it is gone, or took longer than the connection's limit, or its memory cannot be opened.
    """
    (length,) = _LENGTH.unpack(_received(connection, _LENGTH.size, who))
    arguments = pickle.loads(_received(connection, length, who))
    rebuild: Any = rebuild_cuda_tensor
    index = torch.cuda.current_device()
    try:
        return rebuild(*arguments[:DEVICE_ARGUMENT], index, *arguments[DEVICE_ARGUMENT + 1 :])
    except RuntimeError as error:
        fix = "roles.rollout.transport=gloo does without"
        raise TransferError(f"{who}: its memory on their device cannot be opened ({error}): {fix}") from None


def _received(connection: socket.socket, size: int, who: str) -> bytes:
    with _limited(connection, who):
        said = connection.recv(size, socket.MSG_WAITALL)
    if len(said) < size:
        raise TransferError(f"{who} gave no memory and is gone")
    return said


@contextmanager
def _limited(connection: socket.socket, who: str) -> Iterator[None]:
    """Around what waits for the process at the other end."""
    try:
        yield
    except TimeoutError:
        raise TransferError(f"{who} gave no memory within {connection.gettimeout():g} s") from None
    except OSError as error:
        raise TransferError(f"{who} gave no memory and is gone ({error.strerror})") from None


def _mapped(handle: int, buckets: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(handle, 0), dtype=torch.uint8).view(buckets, -1)
