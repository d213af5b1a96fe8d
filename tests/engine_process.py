"""A vLLM engine in a process of its own, driven by its method names."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import traceback
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megappo.workers.settings import EngineSettings

TESTS = Path(__file__).resolve().parent
REPACKS = "TEST_ENGINE_REPACKS"


@dataclass
class EngineError(Exception):
    """What the engine raised: its type's name and the traceback."""

    kind: str
    text: str


class Engine:
    """A :class:`megappo.workers.rollout_engine.RolloutEngine` elsewhere; answers come in the order of the calls."""

    def __init__(self, settings: EngineSettings, log: Path, *, repacks: bool = False) -> None:
        """Start it. ``repacks``: vLLM's own CPU kernels, with private copies of the weights."""
        ours, theirs = socket.socketpair()
        path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
        with theirs, log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path, REPACKS: str(int(repacks))},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self.channel = Connection(ours.detach())
        self.log = log
        self.channel.send(settings)

    def start(self, method: str, *args: Any) -> None:
        """Call without waiting."""
        self.channel.send((method, args))

    def result(self, limit_s: float = 600) -> Any:
        """The answer to the oldest call that has none yet."""
        assert self.channel.poll(limit_s), f"no answer within {limit_s} s:\n{self.log.read_text()[-3000:]}"
        try:
            ok, value = self.channel.recv()
        except EOFError:
            raise AssertionError(f"the engine died:\n{self.log.read_text()[-3000:]}") from None
        if not ok:
            raise EngineError(*value)
        return value

    def forget(self, answers: int) -> None:
        """Let the next answers go, so that later calls do not get them."""
        for _ in range(answers):
            with contextlib.suppress(EngineError):
                self.result()

    def call(self, method: str, *args: Any) -> Any:
        """Call and wait."""
        self.start(method, *args)
        return self.result()

    def close(self) -> None:
        """End the process and its workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.channel.close()


def swap_gate_and_up() -> None:
    """Make the parameter table of this process wrong."""
    from megappo.models import families
    from megappo.models.parameters import GATED_MLP

    known = families.known_families()
    wrong = replace(GATED_MLP[0], hf=GATED_MLP[0].hf[::-1])
    for name, family in known.items():
        layer = tuple(wrong if parameter == GATED_MLP[0] else parameter for parameter in family.layer)
        known[name] = replace(family, layer=layer)


def leave_repacking() -> None:
    """Undo in this process what our extension changes in vLLM."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # a single worker is in this process
    import vllm.model_executor.layers.utils as vllm_layer_utils

    repacking = vllm_layer_utils.dispatch_cpu_unquantized_gemm
    importlib.import_module("megappo.workers.vllm_extension")
    assert vllm_layer_utils.dispatch_cpu_unquantized_gemm is not repacking
    vllm_layer_utils.dispatch_cpu_unquantized_gemm = repacking


def main() -> None:
    from megappo.workers.rollout_engine import RolloutEngine

    channel = Connection(int(sys.argv[1]))
    engine = RolloutEngine(channel.recv())
    while True:
        try:
            method, args = channel.recv()
        except EOFError:
            os.killpg(0, signal.SIGKILL)
        try:
            if method == "swap_gate_and_up":
                channel.send((True, swap_gate_and_up()))
            elif method.startswith("megappo_"):
                channel.send((True, engine.engine.collective_rpc(method, args=args)))
            else:
                channel.send((True, getattr(engine, method)(*args)))
        except Exception as error:
            channel.send((False, (type(error).__name__, traceback.format_exc())))


if os.environ.get(REPACKS) == "1":  # vLLM's worker processes import this file too
    leave_repacking()
if __name__ == "__main__":
    main()
