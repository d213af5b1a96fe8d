"""Worker processes that are forked: they find what a process of its own would find, and end with their server."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from small_run import make_run_folder

from megappo.cluster import forks as module
from megappo.cluster.environment import engine_environment, worker_environment
from megappo.cluster.forks import ENGINE_MODULES, ROLE_MODULES, Forks, ForkServer, Pythons
from megappo.config import load_config

SCRIPT = """\
import json, os, subprocess, sys
from pathlib import Path
threads = sorted(path.read_text().strip() for path in Path(f"/proc/{os.getppid()}/task").glob("*/comm"))
json.dump({
    "process": os.getpid(), "parent": os.getppid(), "group": os.getpgrp(), "name": __name__, "file": __file__,
    "arguments": sys.argv, "folder": os.getcwd(), "environment": dict(os.environ), "path": sys.path[0],
    "modules": list(sys.modules), "threads_of_parent": threads,
    "status": subprocess.run(["false"]).returncode, "input": sys.stdin.read(),
}, sys.stdout)
sys.stderr.write("to standard error")
"""


# vLLM sets its own number of threads, whatever there is before.
OURS = {"TORCHINDUCTOR_COMPILE_THREADS": "8", "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"}
MODULES = {"roles": ROLE_MODULES, "engines": ENGINE_MODULES}


@pytest.fixture(scope="module", params=MODULES)
def server(request: pytest.FixtureRequest) -> Iterator[ForkServer]:
    found = ForkServer(MODULES[request.param], OURS)
    yield found
    found.close()


def run(python: str, folder: Path, *arguments: str) -> tuple[dict[str, object], str]:
    """What a script finds, and what it writes to standard error."""
    (folder / "script.py").write_text(SCRIPT)
    command = [*shlex.split(python), str(folder / "script.py"), *arguments]
    environment = {"OWN": "variable", "TORCHINDUCTOR_COMPILE_THREADS": "8", "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as started:
        out, errors = started.communicate(b"given", timeout=300)
    assert started.returncode == 0, errors
    return json.loads(out), errors.decode()


def test_a_fork_finds_what_a_process_of_its_own_finds(
    server: ForkServer, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    modules = MODULES[request.node.callspec.params["server"]]
    alone, _ = run(sys.executable, tmp_path, "a b", "--c")
    forked, errors = run(server.python, tmp_path, "a b", "--c")
    assert errors == "to standard error"
    assert {*modules} <= {*forked["modules"]} and not {*modules} & {*alone["modules"]}
    own = ("process", "parent", "group", "modules", "threads_of_parent", "environment")
    assert {k: v for k, v in forked.items() if k not in own} == {k: v for k, v in alone.items() if k not in own}
    assert forked["environment"] == {**alone["environment"], **set_by(modules)}
    # Of locks that other threads hold, a fork would wait for ever; jemalloc looks after its own.
    assert [name for name in forked["threads_of_parent"] if not name.startswith(("python", "jemalloc"))] == []
    assert forked["group"] == forked["process"]  # Ray ends a worker by its process group: each has its own
    again, _ = run(server.python, tmp_path)
    assert again["parent"] == forked["parent"] and again["process"] != forked["process"]


def set_by(modules: Sequence[str]) -> dict[str, str]:
    """Environment variables that are there once modules have been imported, where there is no Ray."""
    code = f"""
import importlib, json, os, sys
before, sys.modules["ray"] = dict(os.environ), None
for name in {modules}: importlib.import_module(name)
print(json.dumps({{name: value for name, value in os.environ.items() if before.get(name) != value}}))
"""
    lines = subprocess.run([sys.executable, "-c", code], env={**os.environ, **OURS}, stdout=subprocess.PIPE, check=True)
    return json.loads(lines.stdout.splitlines()[-1])


def test_without_a_server_python_runs_the_script(tmp_path: Path) -> None:
    gone = ForkServer(ROLE_MODULES, {})
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


def test_a_server_whose_command_is_gone_before_it_looks_ends(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as gone:
        pass
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "forks"))
        listener.listen()
        server = [sys.executable, "-m", "megappo.cluster.forks", str(gone.pid), str(listener.fileno())]
        ended = subprocess.run(server, env={**os.environ, **OURS}, pass_fds=[listener.fileno()], timeout=60)
    assert ended.returncode == 1


def test_who_no_longer_waits_for_an_answer_gets_no_fork(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text("open('late', 'w').close()\n")
    server = ForkServer((), OURS)
    os.kill(server._process.pid, signal.SIGSTOP)
    request = json.dumps({"argv": [str(tmp_path / "late.py")], "folder": str(tmp_path), "environment": OURS}).encode()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(shlex.split(server.python)[-1])
        socket.send_fds(client, [len(request).to_bytes(8, "little")], [0, 1, 2])
        client.sendall(request)
    os.kill(server._process.pid, signal.SIGCONT)
    run(server.python, tmp_path)  # comes after it
    assert not (tmp_path / "late").exists()
    server.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that import next to nothing."""
    monkeypatch.setattr(module, "ROLE_MODULES", ("json",))
    monkeypatch.setattr(module, "ENGINE_MODULES", ("json",))


def test_only_workers_on_processors_of_this_machine_are_forked(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(make_run_folder(tmp_path) / "config.yaml")
    with Forks(config) as forks:
        assert forks.pythons().roles is not None and forks.pythons().engines is None
    with Forks(config, engines=True) as forks:
        pythons = forks.pythons()
        assert pythons.engines not in (None, pythons.roles)
    with Forks(replace(config, run=replace(config.run, device="cuda")), engines=True) as forks:
        assert forks.pythons() == Pythons()
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with Forks(config, engines=True) as forks:
        assert forks.pythons() == Pythons()


def test_what_engines_find_of_what_their_user_has_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(make_run_folder(tmp_path) / "config.yaml")
    given = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0-7", "TORCHDYNAMO_DISABLE": "0"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = engine_environment(config)
    assert {name: found[name] for name in given} == {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "0",
    }
    # Of an engine that is not forked, the node's own count: the driver has no defaults for it.
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    assert found["VLLM_USE_FLASHINFER_SAMPLER"] and "VLLM_USE_FLASHINFER_SAMPLER" not in worker_environment(config)


def test_another_ray_gets_servers_that_have_not_read_the_environment_of_the_first(quick: None, tmp_path: Path) -> None:
    config = load_config(make_run_folder(tmp_path) / "config.yaml")
    with Forks(config) as forks:
        first, second = forks.pythons(), forks.pythons()
        assert first != second
        parents = [run(python.roles, tmp_path)[0]["parent"] for python in (second, second, first)]
        assert parents[0] == parents[1]
        assert parents[2] == os.getpid()  # where none answers, Python runs the script
