"""The table of what processes do: told by a thread, while a call runs, hangs or has ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_run import until

from megappo.cluster.watch import Address, Sight, Watch, look, wait_until_gone

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
