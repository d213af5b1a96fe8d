"""Running code that a model wrote where it can do no harm: on this machine in bubblewrap, or on a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol


class SandboxError(ValueError):
    """The sandbox failed, not the code in it: the row has no score. The message names the fix."""


@dataclass(frozen=True)
class Limits:
    """What one program may take.

    Attributes:
        timeout_s: seconds of wall time, and of CPU time of each process.
        memory_mb: MiB of each process, and of the scratch folder.
        processes: processes and threads at once.
        output_kb: KiB printed, on standard output and standard error together.
    """

    timeout_s: float = 5.0
    memory_mb: int = 512
    processes: int = 16
    output_kb: int = 64


class Run(NamedTuple):
    """How a program ended. `failure` is empty, or why it does not count: "timeout after 5 s", "killed by SIGSEGV"."""

    stdout: str
    stderr: str
    failure: str

    @property
    def timed_out(self) -> bool:
        return self.failure.startswith("timeout")


class Sandbox(Protocol):
    """Runs one Python program at a time."""

    limits: Limits

    def run(self, code: str, stdin: str = "") -> Run:
        """Run `code` as a program that reads `stdin`.

        Raises:
            SandboxError: it could not be run; nothing is known about it.
        """
        ...


def too_much_output(limits: Limits) -> str:
    return f"more than {limits.output_kb} kB of output"


def too_late(limits: Limits) -> str:
    return f"timeout after {limits.timeout_s:g} s"
