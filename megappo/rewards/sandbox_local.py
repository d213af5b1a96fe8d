"""Code that a model wrote, run on this machine in bubblewrap (https://github.com/containers/bubblewrap).

A program gets namespaces of its own (processes, network, mounts, IPC, host name), a read-only file system of system
libraries and this Python, a scratch folder in memory, no environment, no privilege, and hard limits. What it starts
lives in its process namespace and dies with it, whatever signals it ignores and whatever session it moved to.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megappo.rewards.sandbox import Limits, Run, SandboxError, too_late, too_much_output
from megappo.rewards.seccomp import seccomp_filter

SCRATCH = "/tmp"
PROGRAM = "/sandbox/main.py"
DEVICES = ("null", "zero", "full", "random", "urandom")
# Also bubblewrap's own environment, which the program could read in /proc.
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": SCRATCH,
    "TMPDIR": SCRATCH,
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",  # the same code prints the same set in the same order
    "PYTHONDONTWRITEBYTECODE": "1",
}
FREE_UIDS = 0x70000000  # from here on nobody hands out user ids (systemd's UIDS-GIDS.md)
ALL_UIDS = ["0", "0", "4294967295"]
OPEN_FILES = 256

PROBE_S = 30.0  # the machine may be busy with what else starts
PROBE = """
import os
interfaces = [line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line]
assert interfaces == ["lo"], f"it sees the network {interfaces}"
assert len([name for name in os.listdir("/proc") if name.isdigit()]) < 5, "it sees other processes"
for folder in ("/", "/usr", "/dev", os.path.dirname(__file__)):
    assert not os.access(folder, os.W_OK), "it may write to " + folder
assert os.access(".", os.W_OK), "it may not write to its scratch folder"
print("isolated")
"""


class LocalSandbox:
    """Programs in bubblewrap, one at a time in a thread.

    Raises:
        SandboxError: this machine cannot isolate them. Code is never run without.
    """

    def __init__(self, limits: Limits):
        self.limits = limits
        program = shutil.which("bwrap")
        if program is None or not sys.platform.startswith("linux"):
            raise _cannot_isolate("it has no bwrap")
        try:
            self._filter = seccomp_filter()
        except KeyError as error:
            raise _cannot_isolate(f"its processor {error} has no system call filter") from None
        self._bubblewrap = [program, *_isolation(limits)]
        self._program = [*_restraint(limits), sys.executable, "-s", PROGRAM]
        probe = self._run(PROBE, "", replace(limits, timeout_s=PROBE_S))
        if probe.stdout != "isolated\n":
            raise _cannot_isolate(f"a trial {probe.failure or 'went wrong'}: {probe.stderr.strip()[-300:]}")

    def run(self, code: str, stdin: str = "") -> Run:
        return self._run(code, stdin, self.limits)

    def _run(self, code: str, stdin: str, limits: Limits) -> Run:
        with (
            _file(code.encode(errors="replace")) as program,
            _file(stdin.encode(errors="replace")) as inputs,
            _file(self._filter) as rules,
            _Bubblewrap([*self._bubblewrap, *_given(program, rules)], self._program, inputs, (program, rules)) as box,
        ):
            output, failure = box.read(limits)
        stdout, stderr = (text.decode(errors="replace") for text in output)
        failure = failure or box.how_it_ended(stderr)
        return Run(stdout, stderr, failure)


class _Bubblewrap:
    """A running sandbox. On leaving it, every process in it is gone."""

    def __init__(self, options: list[str], command: list[str], stdin: int, files: tuple[int, ...]):
        reader, status = os.pipe()
        self._status = os.fdopen(reader, "rb")
        try:
            # In our process group, so that a kill of the group ends it; the program in it has a session of its own.
            self._process = subprocess.Popen(
                [*options, "--json-status-fd", str(status), "--", *command],
                env=ENVIRONMENT,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(*files, status),
            )
        except OSError as error:
            self._status.close()
            raise _cannot_isolate(f"bwrap does not start ({error})") from error
        finally:
            os.close(status)
        self._init = self._find_init()

    def __enter__(self) -> _Bubblewrap:
        return self

    def __exit__(self, *exception: object) -> None:
        """Kill the first process of the namespace: the kernel ends it only once all others in there have ended."""
        if self._init is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._init, signal.SIGKILL)
            select.select([self._init], [], [])
            os.close(self._init)
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()
        self._last_words = self._status.readlines()
        self._status.close()

    def read(self, limits: Limits) -> tuple[tuple[bytes, bytes], str]:
        """Standard output and error until the program ends, and "" or which limit it overran."""
        deadline = time.monotonic() + limits.timeout_s
        room = limits.output_kb * 1024
        assert self._process.stdout is not None and self._process.stderr is not None
        texts = {self._process.stdout.fileno(): bytearray(), self._process.stderr.fileno(): bytearray()}
        output, errors = texts.values()
        failure, open_pipes = "", list(texts)
        while open_pipes and not failure:
            readable, _, _ = select.select(open_pipes, [], [], max(0.0, deadline - time.monotonic()))
            for pipe in readable:
                chunk = os.read(pipe, 65536)
                texts[pipe] += chunk[: room + 1]
                room -= len(chunk)
                if not chunk:
                    open_pipes.remove(pipe)
            if room < 0:
                failure = too_much_output(limits)
            elif time.monotonic() >= deadline:
                failure = too_late(limits)
        if not failure:  # it closed its output, and may still run
            try:
                self._process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                failure = too_late(limits)
        return (bytes(output), bytes(errors)), failure

    def how_it_ended(self, stderr: str) -> str:
        """Why a program that ended by itself failed, or nothing; SandboxError where it was not even started."""
        codes = [json.loads(line).get("exit-code") for line in self._last_words]
        code = next((code for code in codes if code is not None), None)
        if code is None:
            raise SandboxError(f"the sandbox did not come up: {stderr.strip()[-200:] or 'bwrap said nothing'}")
        if code > 128:
            with contextlib.suppress(ValueError):
                return f"killed by {signal.Signals(code - 128).name}"
        return f"exited with code {code}" if code else ""

    def _find_init(self) -> int | None:
        """A handle of the namespace's first process, or None where bubblewrap ended before there was one."""
        line = self._status.readline()
        if not line:
            return None
        try:
            return os.pidfd_open(json.loads(line)["child-pid"])
        except ProcessLookupError:
            return None


def _isolation(limits: Limits) -> list[str]:
    """bubblewrap's options: namespaces, and a file system of what Python needs to run."""
    options = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    options += ["--die-with-parent", "--new-session", "--hostname", "sandbox", "--cap-drop", "ALL"]
    if _is_root():
        options += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]  # for `_restraint`, which gives them up
    else:
        options += ["--unshare-user"]
    options += ["--ro-bind", "/usr", "/usr", *_folder("/etc"), "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for folder in ("/bin", "/sbin", "/lib", "/lib64"):
        if os.path.islink(folder):
            options += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            options += ["--ro-bind", folder, folder]
    # Before what may lie in it.
    options += ["--perms", "1777", "--size", str(limits.memory_mb << 20), "--tmpfs", SCRATCH, "--chdir", SCRATCH]
    for prefix in dict.fromkeys((sys.base_prefix, sys.prefix)):  # the interpreter, and its virtual environment
        if not Path(prefix).is_relative_to("/usr"):
            for parent in list(reversed(Path(prefix).parents))[1:]:
                options += [] if str(parent) == SCRATCH else _folder(str(parent))
            options += ["--ro-bind", prefix, prefix]
    options += _folder("/dev")
    for device in DEVICES:
        options += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    return [*options, "--symlink", SCRATCH, "/dev/shm", "--symlink", "/proc/self/fd", "/dev/fd", "--proc", "/proc"]


def _given(program: int, rules: int) -> list[str]:
    """The options that differ from run to run; after them nothing outside the scratch folder can be written."""
    options = [*_folder(os.path.dirname(PROGRAM)), "--perms", "0444", "--ro-bind-data", str(program), PROGRAM]
    return [*options, "--remount-ro", "/", "--seccomp", str(rules)]


def _folder(path: str) -> list[str]:
    """Those that bubblewrap makes on its own are for root only."""
    return ["--perms", "0755", "--dir", path]


def _restraint(limits: Limits) -> list[str]:
    """The commands, each of which runs the next, that take away what a program could do too much of."""
    command = ["nice", "-n", "10"]
    if _is_root():
        # The kernel does not limit root's processes, and counts a user's over all sandboxes: one user for each worker.
        user = str(FREE_UIDS + os.getpid())
        command += ["setpriv", "--reuid", user, "--regid", user, "--clear-groups", "--"]
    memory = limits.memory_mb << 20
    bounds = {"as": memory, "fsize": memory, "nproc": limits.processes, "nofile": OPEN_FILES, "core": 0}
    bounds["cpu"] = math.ceil(limits.timeout_s) + 1
    return [*command, "prlimit", *(f"--{name}={bound}" for name, bound in bounds.items()), "--"]


def _is_root() -> bool:
    """Whether this is the machine's root, not that of a user namespace (a rootless container)."""
    return os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split() == ALL_UIDS


@contextlib.contextmanager
def _file(content: bytes) -> Iterator[int]:
    """A file in memory that nobody can write to any more."""
    file = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(file, "wb", closefd=False) as writer:
            writer.write(content)
        os.lseek(file, 0, os.SEEK_SET)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        yield file
    finally:
        os.close(file)


def _cannot_isolate(why: str) -> SandboxError:
    return SandboxError(
        f"roles.reward.sandbox: this machine cannot isolate code that a model wrote: {why}; install bubblewrap 0.7 or "
        "later and util-linux, allow it namespaces (in a container: --privileged), or set kind: http and url to a "
        "SandboxFusion server; such code is never run without"
    )
