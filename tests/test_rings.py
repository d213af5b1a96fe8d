"""Memory that a process gives to another of its host; tests/test_gpu_transports.py has that on a device."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable

import pytest
import torch

from megappo.reshard.rings import HostRing, take_device_ring, take_host_ring
from megappo.reshard.transport import TransferError


def test_what_one_writes_the_other_reads() -> None:
    ring = HostRing(2, 8)
    here, there = socket.socketpair()
    ring.give(here)
    taken = take_host_ring(there, "rank 0", 2)
    ring.buckets[1] = torch.arange(8)
    assert taken[1].tolist() == list(range(8)) and taken[0].tolist() == [0] * 8


def test_no_handle_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def handles() -> set[str]:
        return set(os.listdir("/proc/self/fd"))

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = handles()
    ring = HostRing(1, 8)
    del ring
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        HostRing(1, 8)
    assert handles() == before


TAKE: dict[str, Callable[[socket.socket], torch.Tensor]] = {
    "host": lambda end: take_host_ring(end, "rank 7", 1),
    "device": lambda end: take_device_ring(end, "rank 7"),
}


@pytest.mark.parametrize("take", TAKE.values(), ids=TAKE)
def test_who_is_gone_is_named(take: Callable[[socket.socket], torch.Tensor]) -> None:
    here, there = socket.socketpair()
    here.close()
    with pytest.raises(TransferError, match=r"^rank 7 gave no memory and is gone$"):
        take(there)
