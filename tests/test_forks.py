"""Worker processes that are forked: they find what a process of its own would find, and end with their server."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megappo.cluster.forks import MODULES, ForkServer

SCRIPT = """\
import json, os, subprocess, sys
json.dump({
    "process": os.getpid(), "parent": os.getppid(), "group": os.getpgrp(), "name": __name__, "file": __file__,
    "arguments": sys.argv, "folder": os.getcwd(), "environment": dict(os.environ), "path": sys.path[0],
    "modules": list(sys.modules), "threads": len(os.listdir("/proc/self/task")),
    "status": subprocess.run(["false"]).returncode, "input": sys.stdin.read(),
}, sys.stdout)
sys.stderr.write("to standard error")
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    found = ForkServer({"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"})
    yield found
    found.close()


def run(python: str, folder: Path, *arguments: str) -> tuple[dict[str, object], str]:
    """What a script finds, and what it writes to standard error."""
    (folder / "script.py").write_text(SCRIPT)
    command = [*shlex.split(python), str(folder / "script.py"), *arguments]
    environment = {"OWN": "variable", "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as started:
        out, errors = started.communicate(b"given", timeout=300)
    assert started.returncode == 0, errors
    return json.loads(out), errors.decode()


def test_a_fork_finds_what_a_process_of_its_own_finds(server: ForkServer, tmp_path: Path) -> None:
    alone, _ = run(sys.executable, tmp_path, "a b", "--c")
    forked, errors = run(server.python, tmp_path, "a b", "--c")
    assert errors == "to standard error"
    assert set(MODULES) <= set(forked["modules"]) and not set(MODULES) & set(alone["modules"])
    own = ("process", "parent", "group", "modules", "threads")
    assert {k: v for k, v in forked.items() if k not in own} == {k: v for k, v in alone.items() if k not in own}
    assert forked["group"] == forked["process"]  # Ray ends a worker by its process group: each has its own
    again, _ = run(server.python, tmp_path)
    assert again["parent"] == forked["parent"] and again["process"] != forked["process"]


def test_without_a_server_python_runs_the_script(tmp_path: Path) -> None:
    gone = ForkServer({})
    gone.close()
    found, _ = run(gone.python, tmp_path, "a b")
    assert found["arguments"] == [str(tmp_path / "script.py"), "a b"] and found["input"] == "given"


def test_forks_end_with_their_server(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os, signal\nprint(os.getpid(), flush=True)\nsignal.pause()\n")
    command = [*shlex.split(server.python), str(tmp_path / "script.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        process = psutil.Process(int(started.stdout.readline()))
        server.close()
        process.wait(10)
