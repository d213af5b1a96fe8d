"""The table of what processes do: told by a thread, while a call runs, hangs or has ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from small_run import until

from megappo.cluster.watch import Address, Sight, Watch, _where, look, wait_until_gone

pytestmark = pytest.mark.alone

PROCESS = """\
import sys, threading, time
from megappo.cluster.watch import Watch
watch = Watch(sys.argv[1])
print(watch.port, watch.token, flush=True)
def compute_for_long():
    while True: pass
def wait_for_others():
    threading.Event().wait(600)
with watch.doing("score actor"):
    {"computes": compute_for_long, "waits": wait_for_others}[sys.argv[2]]()
"""


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    return Watch(str(tmp_path / "train-rank0.log"))


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[dict[str, tuple[subprocess.Popen[str], Address]]]:
    """One that computes, and one that waits for others."""
    script = tmp_path / "process.py"  # a file, since lines of it are looked at
    script.write_text(PROCESS)
    started = {
        what: subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / f"{what}.log"), what], stdout=subprocess.PIPE, text=True
        )
        for what in ("computes", "waits")
    }
    found = {}
    for what, process in started.items():
        assert process.stdout is not None
        port, token = process.stdout.readline().split()
        found[what] = process, Address("127.0.0.1", int(port), token)
    until(lambda: all("score actor for" in sight.doing for sight in seen(found).values()))
    yield found
    for process in started.values():
        process.kill()
        process.wait()


def seen(processes: dict[str, tuple[subprocess.Popen[str], Address]]) -> dict[str, Sight]:
    return {sight.name: sight for sight in look({what: address for what, (_, address) in processes.items()})}


def states(pid: int) -> set[str]:
    """Of all threads of a process; "T": stopped."""
    files = Path(f"/proc/{pid}/task").glob("*/stat")
    return {file.read_text().rpartition(")")[2].split()[0] for file in files}


def test_the_one_that_others_wait_for_stands_out(
    processes: dict[str, tuple[subprocess.Popen[str], Address]],
) -> None:
    until(lambda: seen(processes)["computes"].doing.count("compute_for_long") == 1)  # not in an import's code
    until(lambda: "waits for others" in seen(processes)["waits"].doing)
    sights = seen(processes)
    assert sights["computes"].late and "score actor for" in sights["computes"].doing
    assert "is in compute_for_long (" in sights["computes"].doing
    assert not sights["waits"].late and "waits for others in wait" in sights["waits"].doing
    stopped, _ = processes["computes"]
    os.kill(stopped.pid, signal.SIGSTOP)
    until(lambda: states(stopped.pid) == {"T"})
    began = time.monotonic()
    sights = seen(processes)
    assert time.monotonic() - began < 5  # it would never answer
    assert sights["computes"].late and sights["computes"].doing.startswith("does not answer")
    assert not sights["waits"].late


def test_one_that_is_killed_is_gone(processes: dict[str, tuple[subprocess.Popen[str], Address]]) -> None:
    addresses = [address for _, address in processes.values()]
    assert not any(address.is_gone() for address in addresses)
    began = time.monotonic()
    wait_until_gone(addresses, 0.5)
    assert time.monotonic() - began >= 0.5  # they are still there
    for process, _ in processes.values():
        process.kill()
        process.wait()
    wait_until_gone(addresses, 60)
    assert all(address.is_gone() for address in addresses)


def test_between_calls_there_is_nothing_to_do(watch: Watch) -> None:
    here = Address("127.0.0.1", watch.port, watch.token)
    assert here.ask() == {}
    with watch.doing("update critic"):
        answer = here.ask()
        assert answer is not None and answer["what"] == "update critic" and abs(answer["since"] - time.time()) < 60
    (sight,) = look({"critic rank 0": here})
    assert (sight.doing, sight.late) == ("has nothing to do", False)
    (sight,) = look({"critic rank 1": None})
    assert (sight.doing, sight.late) == ("has not started", True)


def test_who_does_not_know_the_token_is_told_nothing(watch: Watch) -> None:
    with watch.doing("a secret"):
        assert Address("127.0.0.1", watch.port, "0" * 32).ask() is None
        with socket.create_connection(("127.0.0.1", watch.port)) as silent:  # holds nobody up for long
            answers: list[object] = []
            honest = Address("127.0.0.1", watch.port, watch.token)
            asking = threading.Thread(target=lambda: answers.append(honest.ask()))
            asking.start()
            silent.close()
            asking.join(10)
    assert len(answers) == 1


# --- NCCL's record ---------------------------------------------------------------------------------------------------


def entry(name: str, state: str, *, group: str = "5", collective: int = 0, p2p: int = 0, retired: bool = False) -> Any:
    """Of PyTorch's flight recorder, version 2.10, as it writes it."""
    return {
        **{"collective_seq_id": collective, "p2p_seq_id": p2p, "op_id": 1, "record_id": 0, "pg_id": 3},
        **{"process_group": [group, "PIPELINE_MODEL_PARALLEL_GROUP" if group else "undefined"]},
        **{"profiling_name": f"nccl:{name}", "is_p2p": p2p > 0, "state": state, "retired": retired},
        **{"input_dtypes": ["Float"], "input_sizes": [[2]], "output_dtypes": ["Float"], "output_sizes": [[2]]},
        **{"time_created_ns": 1796066741880107793, "time_discovered_started_ns": 0, "time_discovered_completed_ns": 0},
        **{"thread_id": "140056756730752", "thread_name": "python", "timeout_ms": 1800000},
    }


def both_ways(p2p: int, state: str, **how: Any) -> list[Any]:
    """What ``batch_isend_irecv`` leaves: its parts have no events, so their state never changes."""
    parts = [entry(f"{verb}", "scheduled", p2p=p2p, group=how.get("group", "5")) for verb in ("send 0->1", "recv 0<-1")]
    return [*parts, entry("coalesced", state, p2p=p2p, **how)]


@pytest.mark.parametrize(
    ("entries", "running"),
    [
        ([], ""),
        ([entry("all_reduce", "completed", collective=1, retired=True)], ""),
        ([entry("all_reduce", "started", collective=2)], "nccl:all_reduce 2"),
        ([entry("all_reduce", "scheduled", collective=3, retired=True)], ""),  # given up, or over before it was seen
        (both_ways(1, "completed", retired=True), ""),
        ([*both_ways(1, "completed", retired=True), *both_ways(2, "started")], "nccl:coalesced 0"),
        (
            [*both_ways(1, "completed", retired=True), entry("send 0->1", "scheduled", p2p=2)],  # by itself
            "nccl:send 0->1 0",
        ),
        (
            [*both_ways(1, "completed", retired=True), entry("all_reduce", "scheduled", collective=1)],
            "nccl:all_reduce 1",
        ),
        # The parts of a collective of several launches.
        (
            [
                *(entry("_broadcast_oop", "scheduled", collective=4) for _ in range(2)),
                entry("ALLGATHER_coalesced", "completed", collective=4, retired=True),
            ],
            "",
        ),
        # The weight sync's pairs: nothing retires them, and their events are used again.
        (both_ways(1, "completed", group=""), ""),
        (both_ways(1, "started", group=""), ""),
    ],
)
def test_what_has_ended_is_not_said_to_go_on(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, entries: list[Any], running: str
) -> None:
    """A process that hangs in Python after its last message is late; one that is in a collective is not."""
    record = json.dumps({"entries": entries, "version": "2.10"} if entries else {"version": "2.10"}).encode()
    c10d = SimpleNamespace(_dump_nccl_trace_json=lambda **_: record)
    cuda, inner = SimpleNamespace(is_available=lambda: True), SimpleNamespace(_distributed_c10d=c10d)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, _C=inner))
    with watch.doing("update actor"):
        answer = Address("127.0.0.1", watch.port, watch.token).ask()
    assert answer is not None
    group = " ['5', 'PIPELINE_MODEL_PARALLEL_GROUP']"
    assert (answer["at"] == running + group and answer["waits"]) if running else "nccl:" not in answer["at"]
    assert (tmp_path / "train-rank0.nccl.json").read_bytes() == record


def test_a_rank_that_waits_for_a_gpu_of_another_is_not_late() -> None:
    """In what polls NCCL, and in what gives it so much time to connect."""
    from megappo.reshard import nccl
    from megappo.time_limit import within

    release = threading.Event()
    work = SimpleNamespace(is_completed=release.is_set, wait=lambda: None)
    late = nccl._Lateness("rank 1", "recv", 60.0, 1.0)
    message = nccl.NcclWork(cast(Any, None), work, cast(Any, None), late)
    waits: list[Callable[[], Any]] = [message.arrive, lambda: within(60, release.wait)]
    threads = [threading.Thread(target=wait, daemon=True) for wait in waits]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            until(lambda thread=thread: _where(sys._current_frames()[thread.ident])["waits"])
    finally:
        release.set()
        for thread in threads:
            thread.join(10)
