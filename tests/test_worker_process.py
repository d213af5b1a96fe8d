"""A worker process by itself: it ends with the process that started it, whatever it is doing."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time

import psutil
from small_run import kill


def test_a_worker_ends_when_its_parent_is_killed_even_if_it_does_not_listen() -> None:
    worker = """
        import signal, time
        from megappo.cluster.actors import LoggedProcess
        LoggedProcess("/dev/null")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    """
    parent = f"""
        import subprocess, sys, time
        worker = subprocess.Popen([sys.executable, "-c", {textwrap.dedent(worker)!r}])
        print(worker.pid, flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        process = psutil.Process(int(started.stdout.readline()))
        while not _ignores_sigterm(process):  # which it does last
            time.sleep(0.05)
        kill(started.pid)
    process.wait(100)


def _ignores_sigterm(process: psutil.Process) -> bool:
    with open(f"/proc/{process.pid}/status") as status:
        ignored = next(line for line in status if line.startswith("SigIgn:"))
    return bool(int(ignored.split()[1], 16) >> 14 & 1)
