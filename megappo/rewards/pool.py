"""Processes that score samples under a time limit, each sample exactly once, whatever a reward function does.

Every worker has a channel of its own and answers sample by sample. So it is known which sample a process died at, the
rest of its chunk need not run twice, and nothing (no lock, no queue) is shared that a kill could leave broken; the
general process pools offer none of the three.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from megappo.rewards.resolve import RewardError
from megappo.rewards.worker import Outcome, Sample

START_LIMIT_S = 120.0  # for Python to start and to import the reward functions
MAX_CHUNK = 32


class WorkerPool:
    """`processes` workers, started at once and replaced as they die.

    Attributes:
        rewards_tokens: whether some function takes the tokens of a response.

    Args:
        function, by_source, sandbox: as in RewardTable.
        timeout_s: seconds one sample may take; then its process is killed.
        log_file: what the functions print is appended here; None throws it away.

    Raises:
        RewardError: a reward that does not resolve, or whose import ends the process or takes for ever.
    """

    def __init__(
        self,
        function: str | None,
        by_source: Mapping[str, str],
        timeout_s: float,
        processes: int,
        log_file: str | None = None,
        sandbox: Mapping[str, Any] | None = None,
    ):
        self._arguments = (function, dict(by_source), timeout_s, log_file, dict(sandbox or {}))
        self._workers: list[_Worker] = []
        self._closed = False
        try:
            self._workers = [_Worker(*self._arguments) for _ in range(processes)]
            for worker in self._workers:
                worker.wait_ready()
            self.rewards_tokens = any(worker.rewards_tokens for worker in self._workers)
        except BaseException:
            self.close()
            raise

    def run(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Score all samples; the outcomes are in the same order. One thread at a time."""
        if self._closed:
            raise RewardError("the reward processes are closed; make a new manager")
        outcomes: list[Outcome | None] = [None] * len(samples)
        pending = deque(range(len(samples)))
        try:
            while pending or any(worker.taken for worker in self._workers):
                self._hand_out(samples, pending)
                self._collect(outcomes, pending)
        except BaseException:  # interrupted: no worker may go on with samples that nobody waits for
            self.close()
            raise
        return [outcome for outcome in outcomes if outcome is not None]

    def close(self) -> None:
        """End all processes and what they started. Calling it again does nothing."""
        self._closed = True
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def _hand_out(self, samples: Sequence[Sample], pending: deque[int]) -> None:
        for worker in self._workers:
            if worker.ready and not worker.taken and pending:
                # Chunks shrink towards the end, so that no worker is left alone with many slow samples.
                size = max(1, min(MAX_CHUNK, len(pending) // (2 * len(self._workers))))
                chunk = [pending.popleft() for _ in range(size)]
                if not worker.give(chunk, [samples[i] for i in chunk]):  # it died while idle: no sample's fault
                    pending.extendleft(reversed(chunk))
                    self._replace(worker)

    def _collect(self, outcomes: list[Outcome | None], pending: deque[int]) -> None:
        """Wait until some worker says something, ends, or is late; take the answers, replace those gone."""
        busy = [worker for worker in self._workers if worker.taken or not worker.ready]
        wait(
            [worker.channel for worker in busy],
            max(0.0, min((w.deadline for w in busy), default=0.0) - time.monotonic()),
        )
        for worker in busy:
            failure = worker.read(outcomes)
            if failure:
                outcomes[worker.taken.popleft()] = Outcome(0.0, failure)
                pending.extendleft(reversed(worker.taken))
                self._replace(worker)

    def _replace(self, worker: _Worker) -> None:
        worker.kill()
        self._workers[self._workers.index(worker)] = _Worker(*self._arguments)


class _Worker:
    """One process. `taken`: the samples it has and has not answered yet, the one it is at first."""

    def __init__(
        self,
        function: str | None,
        by_source: Mapping[str, str],
        timeout_s: float,
        log_file: str | None,
        sandbox: Mapping[str, Any],
    ):
        self._timeout_s = timeout_s
        self.ready = self.rewards_tokens = False
        self.taken: deque[int] = deque()
        self.deadline = time.monotonic() + START_LIMIT_S
        ours, theirs = socket.socketpair()
        life, self._life = os.pipe()
        # A bare interpreter rather than multiprocessing: no fork of a process with threads, no second import of the
        # parent's main module, no lock or helper process shared with anything else.
        code = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            "from megappo.rewards.worker import serve\n"
            f"serve({theirs.fileno()}, {life}, {function!r}, {dict(by_source)!r}, {dict(sandbox)!r})"
        )
        with theirs, open(log_file or os.devnull, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", code],  # what it has printed is in the log even if it is killed
                pass_fds=(theirs.fileno(), life),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for us; a kill reaches what a reward started
            )
        os.close(life)
        self.channel = Connection(ours.detach())

    def wait_ready(self) -> None:
        """Raise RewardError unless the process resolves the rewards."""
        while not self.ready:
            wait([self.channel], max(0.0, self.deadline - time.monotonic()))
            self.read([])

    def give(self, indices: Sequence[int], samples: Sequence[Sample]) -> bool:
        """Hand over a chunk; False if the process is gone."""
        try:
            self.channel.send(list(samples))
        except OSError:
            return False
        self.taken.extend(indices)
        self.deadline = time.monotonic() + self._timeout_s
        return True

    def read(self, outcomes: list[Outcome | None]) -> str:
        """Put the answers that are there into `outcomes`; "", or why the process is of no more use."""
        failure = ""
        try:
            while (self.taken or not self.ready) and self.channel.poll():
                message = self.channel.recv()
                if self.ready:
                    outcomes[self.taken.popleft()] = message
                elif isinstance(message, str):
                    raise RewardError(message)
                else:
                    self.rewards_tokens = message
                self.ready = True
                self.deadline = time.monotonic() + self._timeout_s
        except (EOFError, OSError):
            failure = self._how_it_ended()
        late = (self.taken or not self.ready) and time.monotonic() >= self.deadline
        if late and not failure:
            failure = f"timeout after {self._timeout_s if self.ready else START_LIMIT_S:g} s"
        if failure and not self.ready:
            raise RewardError(f"a reward process did not start: {failure}; look at what importing the reward does")
        return failure

    def kill(self) -> None:
        """End the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if not self.channel.closed:
            self.channel.close()
            os.close(self._life)

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "closed its channel"
        if code >= 0:
            return f"exited with code {code}"
        name = signal.Signals(-code).name
        return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
