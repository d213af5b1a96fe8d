"""Forming a transfer group: whoever keeps the others from it is named in time, and starting over is tried."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed import TCPStore

from megappo.cluster import actors, calls
from megappo.cluster.calls import Call, Calls, Place, WorkerLost, _Failure
from megappo.cluster.watch import Watch
from megappo.reshard.gloo import GlooTransport, host_store
from megappo.reshard.rings import take_device_ring, take_host_ring
from megappo.reshard.shared_memory import open_rings
from megappo.reshard.transport import TransferError

pytestmark = pytest.mark.alone

LIMIT_S = 1.0


def join(store: TCPStore, rank: int, world: int) -> GlooTransport:
    return GlooTransport("127.0.0.1", store.port, rank, world, LIMIT_S, 1024, "actor rank {}".format)


def together(*works: Callable[[], Any]) -> list[Any]:
    """What comes of works that wait for each other: values and errors."""

    def outcome(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(works)) as threads:
        return list(threads.map(outcome, works))


@pytest.mark.parametrize(
    ("world", "who"),
    [
        (3, "actor rank 2"),
        (5, "actor rank 2, actor rank 3, actor rank 4"),
        (9, "actor rank 2, actor rank 3, actor rank 4, actor rank 5 and 3 more"),
    ],
)
def test_ranks_that_never_join_are_named(world: int, who: str) -> None:
    store = host_store("127.0.0.1", 60.0)
    for error in together(*(lambda rank=rank: join(store, rank, world) for rank in (0, 1))):
        assert isinstance(error, TransferError), error
        assert str(error) == f"{who} did not join the transfer group within 1 s"


def test_a_run_starts_over_when_a_rank_did_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the rank to blame that says so: it is a loss of another."""
    monkeypatch.setattr(calls, "GRACE_S", 0.0)
    store = host_store("127.0.0.1", 60.0)
    (error,) = together(lambda: join(store, 0, 2))
    place = Place("actor", 0, "train", "10.0.0.1", "logs/train-rank0.log")
    text = "".join(traceback.format_exception(error))
    lost = Calls(1.0)._blame([_Failure(Call(place, "join_transfer", cast(Any, None)), text, died=False)])
    assert isinstance(lost, WorkerLost) and "actor rank 1 did not join the transfer group within 1 s" in str(lost)


def test_a_meeting_point_that_is_gone_is_named() -> None:
    port = host_store("127.0.0.1", 60.0).port
    with pytest.raises(TransferError, match=rf"^the meeting point of all ranks, 127.0.0.1:{port}, is out of reach \("):
        GlooTransport("127.0.0.1", port, 0, 2, LIMIT_S, 1024)


# --- shared memory ---------------------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[list[GlooTransport]]:
    store = host_store("127.0.0.1", 60.0)
    yield together(*(lambda rank=rank: join(store, rank, 2) for rank in (0, 1)))


@pytest.mark.parametrize(("receivers", "senders"), [([1], []), ([], [1])], ids=["a receiver", "a sender"])
def test_a_rank_that_opens_no_ring_is_named(
    pair: list[GlooTransport], receivers: list[int], senders: list[int]
) -> None:
    with pytest.raises(TransferError, match=r"^actor rank 1 did not join the transfer group within 1 s$"):
        open_rings(pair[0], receivers, senders, 2, 1024, torch.device("cpu"))


@pytest.mark.parametrize("take", [partial(take_host_ring, buckets=2), take_device_ring], ids=["host", "device"])
def test_a_sender_that_stops_before_it_gives_its_memory_is_named(take: Callable[[socket.socket, str], Any]) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    ours.settimeout(0.1)
    with pytest.raises(TransferError, match=r"^actor rank 1 gave no memory within 0.1 s$"):
        take(ours, "actor rank 1")
    theirs.close()
    with pytest.raises(TransferError, match=r"^actor rank 1 gave no memory and is gone$"):
        take(ours, "actor rank 1")


# --- what a process may open -----------------------------------------------------------------------------------------

JOINING = """\
import os, resource, sys
from megappo.reshard.gloo import GlooTransport
world, room, port = 24, *map(int, sys.argv[1:])
children = []
for rank in range(world):
    if not (child := os.fork()):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        soft = len(os.listdir("/proc/self/fd")) + 10
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, soft + room if room >= 0 else hard))
        try:
            group = GlooTransport("127.0.0.1", port, rank, world, 30.0, 1024)
            group.store.set(f"joined/{rank}", "")
            group.store.wait([f"joined/{other}" for other in range(world)])
        except OSError as error:
            print(error, file=sys.stderr)
            os._exit(3)
        os._exit(0)
    children.append(child)
print({os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children})
"""
"""Each process may open ten files more, and so many more if it asks for them (-1: as many as the host allows)."""


def joined(room: int) -> tuple[str, str]:
    store = host_store("127.0.0.1", 60.0)
    command = [sys.executable, "-c", JOINING, str(room), str(store.port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.stdout.strip(), done.stderr


def test_a_group_of_more_ranks_than_files_that_a_process_may_open_forms() -> None:
    assert joined(-1)[0] == "{0}"


def test_a_host_that_forbids_so_many_files_is_told_before_anything_else() -> None:
    codes, said = joined(5)
    assert codes == "{3}"
    assert "the transfer group takes 40 open files in this process, which has " in said
    assert "raise the hard limit (ulimit -Hn)" in said


# --- meeting points --------------------------------------------------------------------------------------------------


def test_a_new_meeting_point_takes_the_place_of_the_last_but_never_of_the_worlds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    process = object.__new__(actors.MegatronProcess)  # the constructor takes this process's output away
    process.watch, process.stores = Watch(str(tmp_path / "train-rank0.log")), []
    before, ports = usage(), [process.host_store(60.0).value[1] for _ in range(2)]
    two = usage()
    ports += [process.host_store(60.0).value[1] for _ in range(4)]
    assert usage() == two != before
    world, *others, newest = ports
    for port in (world, newest):
        TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False).set("here", "")
    for port in others:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


def usage() -> tuple[int, int]:
    """(Threads, open files) of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
