"""Worker processes that start at once: forked from one that has imported what they need.

Without it each worker imports torch and Megatron or vLLM for itself: seconds of processor time, on few cores one worker
after the other. Ray still starts, places and watches the workers; but what it executes in place of Python,
``megappo/cluster/forked.py``, has a fork server run the worker's script. Only on the CPU, since CUDA does not survive
a fork, and only in a Ray of one's own, which is on one machine.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megappo.cluster.environment import engine_environment, has_own_ray, worker_environment
from megappo.config import Devices
from megappo.workers.lifetime import end_with_parent

ROLE_MODULES = ("torch._dynamo", "transformers", "megappo.workers.megatron_role", "megappo.workers.weight_sender")
ENGINE_MODULES = ("torch._dynamo", "vllm.entrypoints.llm", "megappo.workers.vllm_extension", "megappo.workers.stream")
"""Imported at once: what workers import sooner or later (torch._dynamo comes with the first optimizer)."""

RAY_MODULES = ("megappo.cluster.actors", "ray._private.workers.default_worker")
"""Imported with the first worker's environment, which Ray reads as it is imported."""


@dataclass(frozen=True)
class Pythons:
    """Commands that worker processes start by in place of Python; ``None`` where they are not forked.

    Attributes:
        roles: of Megatron's processes, and those of rewards.
        engines: of vLLM's.
    """

    roles: str | None = None
    engines: str | None = None


class Forks:
    """Fork servers for the workers of a command, where these can be forked; a context manager.

    Its state: the servers. They start with it, and import while the caller goes on.
    """

    def __init__(self, config: Devices, *, engines: bool = False) -> None:
        """Start them.

        Args:
            engines: whether there will be engines.
        """
        self._wanted = {"roles": (ROLE_MODULES, worker_environment(config))}
        if engines:
            self._wanted["engines"] = (ENGINE_MODULES, engine_environment(config))
        if config.run.device != "cpu" or not has_own_ray():
            self._wanted.clear()
        self._are_taken = False
        self._servers: dict[str, ForkServer] = {}
        try:
            self._start()
        except BaseException:  # Ctrl-C
            self._close()
            raise

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def pythons(self) -> Pythons:
        """Those of a Ray that is about to start: with its environment a server imports what reads it only once.

        Workers that were forked for another Ray end here.
        """
        if self._are_taken:
            self._close()
            self._start()
        self._are_taken = True
        return Pythons(**{kind: server.python for kind, server in self._servers.items()})

    def _start(self) -> None:
        for kind, wanted in self._wanted.items():
            self._servers[kind] = ForkServer(*wanted)

    def _close(self) -> None:
        for server in self._servers.values():
            server.close()


class ForkServer:
    """The process that workers are forked from.

    Attributes:
        python: command that runs a Python script in a fork.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it; it imports while the caller goes on.

        Args:
            modules: to import at once.
            environment: of the workers, for what libraries read as they are imported.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="megappo-")
        path = str(Path(self._folder.name) / "forks")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(128)
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(os.getpid()), str(listener.fileno()), *modules],
                pass_fds=[listener.fileno()],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the driver
            )
        self.python = shlex.join([sys.executable, "-I", "-S", str(Path(__file__).with_name("forked.py")), path])

    def close(self) -> None:
        """End it, and with it the workers that are left."""
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


def serve(parent: int, listener: socket.socket, modules: Sequence[str]) -> None:
    """Fork a process for each request, in which this returns after the script that was asked for."""
    end_with_parent(parent)
    server, before = os.getpid(), dict(os.environ)
    # Ray reads its environment as it is imported, and there is none yet: vLLM, which would import it for an executor
    # that is not used here, is told that there is no Ray.
    sys.modules["ray"] = None  # type: ignore[assignment]
    _import(modules)
    del sys.modules["ray"]
    # What is imported sets variables that it reads later on: a process of its own would have them as well.
    set_by_imports = {name: value for name, value in os.environ.items() if before.get(name) != value}
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave no zombies
    while True:
        peer, _ = listener.accept()
        with peer:
            try:
                header, descriptors, _, _ = socket.recv_fds(peer, 8, 3)
                request = json.loads(peer.recv(int.from_bytes(header, "little"), socket.MSG_WAITALL))
                if _is_gone(peer):
                    continue
            except (OSError, ValueError):  # it was killed while it asked
                continue
            if "ray" not in sys.modules:
                os.environ.update(request["environment"])
                _import(RAY_MODULES)
            if os.fork() == 0:
                break
            with contextlib.suppress(OSError):
                peer.sendall(b"1")
        for descriptor in descriptors:
            os.close(descriptor)
    listener.close()
    request["environment"] = {**request["environment"], **set_by_imports}
    end_with_parent(server)
    _run(request, descriptors)


def _is_gone(peer: socket.socket) -> bool:
    """Whether it was killed while it waited for an answer: Ray gives a worker that is late up, and starts another."""
    try:
        return not peer.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False


def _import(modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)


def _run(request: dict[str, Any], descriptors: Sequence[int]) -> None:
    """Become what ``python`` with these arguments would be."""
    os.setpgrp()  # Ray ends a worker by its process group
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for standard, descriptor in enumerate(descriptors):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["argv"]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    serve(int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])), sys.argv[3:])
