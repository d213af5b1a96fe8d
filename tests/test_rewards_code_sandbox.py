"""Programs that do what programs should not, in the real sandbox."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
import venv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from megappo.rewards import sandbox_local
from megappo.rewards.code import compute_score
from megappo.rewards.manager import RewardManager
from megappo.rewards.resolve import RewardError
from megappo.rewards.sandbox import Limits, SandboxError
from megappo.rewards.sandbox_local import LocalSandbox

pytestmark = pytest.mark.alone

LIMITS = Limits(timeout_s=1.0, memory_mb=128, processes=8, output_kb=16)
needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap, and there is no bwrap")


@pytest.fixture(scope="module")
def sandbox() -> LocalSandbox:
    return LocalSandbox(LIMITS)


@pytest.fixture(scope="module")
def patient() -> LocalSandbox:
    """For programs that should end by themselves, on a machine however busy."""
    return LocalSandbox(replace(LIMITS, timeout_s=20.0))


@pytest.fixture
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process that has the environment of this test's sandboxes outlives them, not even by a moment."""
    mark = uuid.uuid4().hex
    monkeypatch.setitem(sandbox_local.ENVIRONMENT, "MARK", mark)
    yield
    assert living(mark) == []


def living(mark: str) -> list[int]:
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                pids.append(int(path.parent.name))
        except OSError:
            continue
    return pids


@needs_bubblewrap
def test_a_program_reads_and_prints(patient: LocalSandbox) -> None:
    run = patient.run("import sys\nprint(sys.stdin.read().upper())\nprint('note', file=sys.stderr)", "grüße\n")
    assert run == ("GRÜSSE\n\n", "note\n", "")
    assert patient.run("raise SystemExit(3)").failure == "exited with code 3"
    assert "ZeroDivisionError" in patient.run("1/0").stderr
    assert patient.run("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)").failure == "killed by SIGSEGV"


STUBBORN = "import signal\nfor s in (1, 2, 3, 13, 14, 15, 24): signal.signal(s, signal.SIG_IGN)\n"
DAEMON = "import os, sys, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n  "
TIMEOUT = "timeout after 1 s"


@needs_bubblewrap
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("code", "failure"),
    {
        "endless loop": ("while True: pass", TIMEOUT),
        "sleep": ("import time; time.sleep(600)", TIMEOUT),
        "waits for input": ("import os\nwhile True: os.read(0, 1)", TIMEOUT),
        "ignores signals": (STUBBORN + "while True: pass", TIMEOUT),
        "closes its output": ("import os, time\nfor n in range(9): os.closerange(0, 9)\ntime.sleep(600)", TIMEOUT),
        "fork bomb": ("import os\nwhile True:\n try: os.fork()\n except OSError: pass", TIMEOUT),
        "threads": ("import threading, time\nwhile True: threading.Thread(target=time.sleep, args=[9]).start()", None),
        "daemon that holds the output": (DAEMON + STUBBORN.replace("\n", "\n  ") + "time.sleep(600)", ""),
        "daemon without output": (DAEMON + "os.closerange(0, 9)\n  time.sleep(600)", ""),
        "kills all": ("import os, signal; os.kill(-1, signal.SIGKILL)", None),
        "stops its group": ("import os, signal; os.kill(0, signal.SIGSTOP)", TIMEOUT),
        "memory": ("x = bytearray(1 << 28)", "exited with code 1"),
        "recursion": ("import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()", None),
        "flood": ("while True: print('x' * 1000)", "more than 16 kB of output"),
        "flood of errors": ("import os\nwhile True: os.write(2, b'x' * 9999)", "more than 16 kB of output"),
        "fills its scratch folder": (
            "b = bytes(1 << 23)\nfor n in range(17): open(str(n), 'wb').write(b)", "exited with code 1",
        ),
    }.values(),
)  # fmt: skip
def test_a_bad_program_ends_in_time(
    sandbox: LocalSandbox, patient: LocalSandbox, code: str, failure: str | None
) -> None:
    started = time.monotonic()
    run = (sandbox if failure in (TIMEOUT, None) else patient).run(code)
    assert time.monotonic() - started < 15  # it would go on for good, or for 10 minutes
    assert len(run.stdout) + len(run.stderr) <= 2 * (LIMITS.output_kb * 1024 + 1)
    assert run.failure if failure is None else run.failure == failure
    assert patient.run("print(1)").stdout == "1\n"  # the next is not touched


FORBIDDEN = [
    "open('/x', 'w')",
    "open('/usr/x', 'w')",
    "open('/dev/x', 'w')",
    "open('/sandbox/main.py', 'w')",
    "open(__import__('sys').prefix + '/x', 'w')",
    "open('/proc/sys/kernel/hostname', 'w')",
    "open('/etc/passwd')",
    "open(os.path.join('/proc/1', 'root', 'etc/passwd'))",
    "os.listdir('/home')",
    f"open({__file__!r})",
    f"os.kill({os.getpid()}, 0)",
    f"open('/proc/{os.getpid()}/environ')",
    "os.setuid(0)",
    "os.chroot('/')",
    "os.nice(-5)",
    "os.memfd_create('x')",
    "socket.create_connection(('127.0.0.1', PORT), timeout=5)",
    "socket.create_connection(('10.0.0.1', 80), timeout=5)",
    "socket.socket(40)",  # AF_VSOCK, which no network namespace covers
    "call('unshare', 0x10000000)",
    "call('unshare', 0x10000000 | 0x00020000)",
    "call('mount', b'none', b'/tmp', b'tmpfs', 0, b'')",
    "call('ptrace', 0, 0, 0, 0)",
    "call('shmget', 0, 1 << 30, 0o1600)",
    "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "resource.setrlimit(resource.RLIMIT_NPROC, (99, 99))",
]


@needs_bubblewrap
@pytest.mark.usefixtures("nothing_left")
def test_what_a_program_cannot_do(patient: LocalSandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        attempts = [attempt.replace("PORT", str(server.getsockname()[1])) for attempt in FORBIDDEN]
        run = patient.run(
            "import ctypes, os, resource, socket\n"
            "def call(name, *arguments):\n"
            "    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) < 0:\n"
            "        raise OSError(ctypes.get_errno(), name)\n"
            f"for attempt in {attempts}:\n"
            "    try:\n"
            "        exec(attempt)\n"
            "        print('done:', attempt)\n"
            "    except (OSError, ValueError):\n"
            "        print('refused')\n"
        )
    assert run.failure == "", run
    assert run.stdout.splitlines() == ["refused"] * len(attempts)


@needs_bubblewrap
def test_the_parents_secrets_stay_outside(patient: LocalSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret-of-the-parent")
    run = patient.run(
        "import glob, os\nprint(dict(os.environ), os.listdir('/'), os.listdir('/proc/self/fd'))\n"
        "for path in glob.glob('/proc/[0-9]*/environ') + glob.glob('/proc/[0-9]*/cmdline'):\n"
        "    try: print(open(path).read())\n    except OSError: pass\n"
    )
    assert run.failure == "" and "HOME" in run.stdout
    assert "secret-of-the-parent" not in run.stdout
    assert "home" not in run.stdout.splitlines()[0] and "['0', '1', '2', '3']" in run.stdout


@needs_bubblewrap
def test_scratch_is_there_and_new_each_time(patient: LocalSandbox) -> None:
    code = "import os; print(os.listdir('.')); open('/tmp/a', 'w').write('b'); print(open('a').read())"
    environments = [Path(prefix) for prefix in {sys.prefix, sys.base_prefix}]  # which may lie there
    there = sorted({path.parts[2] for path in environments if path.is_relative_to("/tmp")})
    assert patient.run(code).stdout == patient.run(code).stdout == f"{there}\nb\n"


@needs_bubblewrap
def test_a_program_may_use_its_processes(patient: LocalSandbox) -> None:
    run = patient.run(
        "import multiprocessing, subprocess, threading\n"
        "print(subprocess.run(['echo', 'hello'], capture_output=True, text=True).stdout)\n"
        "with multiprocessing.get_context('fork').Pool(2) as pool: print(pool.map(abs, [-1, -2]))\n"
    )
    assert run.stdout == "hello\n\n[1, 2]\n", run.stderr


SQUARE = "```python\nclass Solution:\n    def square(self, x):\n        print('noise')\n        return x * x\n```"
ADD = "```python\nfrom __future__ import annotations\nprint('noise')\ndef add(a, b):\n    return a + b\n```"
EARLY = "```python\nimport os\ndef add(a, b): os._exit(0)\n```"
TESTS = ["assert add(1, 2) == 3", "assert add(1, 1) == 3", "from solution import add\nassert add('a', 'b') == 'ab'"]
CHECK = {"test": "def check(candidate):\n    assert candidate(2, 3) == 5", "entry_point": "add"}


@needs_bubblewrap
@pytest.mark.parametrize(
    ("response", "truth", "passed"),
    [
        ("```python\nprint(int(input()) + 1)\n```", {"inputs": ["1\n", "5"], "outputs": ["2", "7"]}, 0.5),
        ("```python\nif __name__ == '__main__':\n    print(7)\n```", {"inputs": [""], "outputs": ["7\n"]}, 1.0),
        (SQUARE, {"inputs": ["3", "4", "5"], "outputs": ["9", "16", "24"], "fn_name": "square"}, 2 / 3),
        (ADD, {"inputs": ["[1]\n[2]", [[1], [2]], [1, 2]], "outputs": ["[1, 2]", [[1, 2]], 3], "fn_name": "add"}, 1.0),
        (ADD, {"inputs": [[1, 2]], "outputs": [3], "fn_name": "sub"}, 0.0),
        (EARLY, {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}, 0.0),
        (ADD, TESTS, 2 / 3),
        (EARLY, TESTS, 0.0),
        (ADD, CHECK, 1.0),
        (EARLY, CHECK, 0.0),
        (ADD, "assert add(2, 2) == 4", 1.0),
        ("```python\nthis is no Python\n```", "assert True", 0.0),
    ],
)
def test_forms_of_tests(patient: LocalSandbox, response: str, truth: object, passed: float) -> None:
    text = truth if isinstance(truth, str) else json.dumps(truth)
    result = compute_score("code", response, text, {}, sandbox=patient)
    assert result == {"score": passed == 1.0, "acc": passed == 1.0, "passed": pytest.approx(passed), "format": 1.0}


@needs_bubblewrap
@pytest.mark.usefixtures("nothing_left")
def test_each_row_pays_for_itself() -> None:
    """The reward as a run uses it: by name, in reward processes."""
    codes = ["print(2)", "while True: pass", "print(3)", "import os\nwhile True: os.fork()", "print(2)", "print(2)"]
    truths = [json.dumps({"inputs": ["1"], "outputs": ["2"]})] * 5 + ['{"inputs": ["1"]}']
    table = pa.table(
        {
            "id": pa.array(range(6), pa.int64()),
            "data_source": ["code"] * 6,
            "ground_truth": truths,
            "extra_info": ["{}"] * 6,
        }
    )
    settings = {"kind": "local", "url": None, "timeout_s": 3.0, "memory_mb": 128, "processes": 8, "output_kb": 16}
    with RewardManager("megappo.rewards.code", {}, timeout_s=20, processes=2, sandbox=settings) as manager:
        scored = manager.score(table, [f"```python\n{code}\n```" for code in codes])
    assert scored.column("score").to_pylist() == [1, 0, 0, 0, 1, 0]
    failures = scored.column("failure").to_pylist()
    assert failures[:5] == [""] * 5 and failures[5].startswith("ValueError: the ground truth")


@needs_bubblewrap
def test_a_killed_worker_takes_its_sandbox_along() -> None:
    mark = uuid.uuid4().hex
    code = (
        "from megappo.rewards import sandbox_local as local\n"
        f"local.ENVIRONMENT['MARK'] = {mark!r}\n"
        "box = local.LocalSandbox(local.Limits(timeout_s=60))\n"
        "print('ready', flush=True)\n"
        f"box.run({DAEMON + 'time.sleep(600)'!r} + '\\ntime.sleep(600)')"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    assert worker.stdout is not None and worker.stdout.readline() == b"ready\n"
    deadline = time.monotonic() + 100
    while len(living(mark)) < 4 and time.monotonic() < deadline:  # bwrap, its init, the program, its daemon
        time.sleep(0.02)
    assert len(living(mark)) >= 4
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    worker.stdout.close()
    while living(mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert living(mark) == []


@needs_bubblewrap
def test_an_environment_may_lie_where_the_scratch_folder_is() -> None:
    with tempfile.TemporaryDirectory(dir=sandbox_local.SCRATCH) as folder:
        os.chmod(folder, 0o755)  # as environments are
        venv.create(folder, symlinks=True)
        code = (
            "from megappo.rewards.sandbox_local import Limits, LocalSandbox\n"
            'inside = \'import os, sys; open("new", "w"); print(sys.prefix, os.access(sys.prefix, os.W_OK))\'\n'
            "print(LocalSandbox(Limits(timeout_s=20)).run(inside).stdout, end='')"
        )
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [f"{folder}/bin/python", "-c", code]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.stdout == f"{folder} False\n", done.stderr


def test_without_bubblewrap_nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match=r"it has no bwrap; install bubblewrap .* or set kind: http"):
        LocalSandbox(LIMITS)
    with pytest.raises(RewardError, match="it has no bwrap"):
        RewardManager("megappo.rewards.code", {}, timeout_s=8, processes=1)


def test_a_bubblewrap_that_may_not_isolate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="No permissions to create new namespace"):
        LocalSandbox(LIMITS)
