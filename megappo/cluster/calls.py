"""Remote calls that are watched together: the first one that fails ends the run, with a name on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import RayActorError, RayError

Result = TypeVar("Result")

GRACE_S = 2.0
"""How long further failures are collected after the first, in seconds."""


class WorkerFailed(RuntimeError):
    """A worker raised, died or did not answer in time; the message names role, rank and node."""


@dataclass(frozen=True)
class Place:
    """Who a call runs on."""

    role: str
    rank: int
    pool: str
    node: str
    log: str

    def __str__(self) -> str:
        return f"{self.role} rank {self.rank} (pool {self.pool}, node {self.node})"


@dataclass(frozen=True)
class Timed:
    """What every worker method returns: its value or the traceback of its failure, and when it ran (Unix seconds).

    ``device_memory_gib`` is what all processes together had taken of the worker's device when it ended.
    """

    value: Any
    began: float
    ended: float
    failure: str | None = None
    device_memory_gib: float | None = None


@dataclass(frozen=True)
class Span:
    """When a worker was busy with what."""

    place: Place
    method: str
    began: float
    ended: float
    device_memory_gib: float | None = None


@dataclass(frozen=True)
class Call:
    """A call under way."""

    place: Place
    method: str
    ref: ray.ObjectRef


@dataclass(frozen=True)
class Pending(Generic[Result]):
    """The same work on several ranks, and how their values become one result."""

    calls: tuple[Call, ...]
    combine: Callable[[list[Any]], Result]


@dataclass
class Calls:
    """All calls under way. ``spans`` collects when each finished one ran, until the reader clears it.

    Attributes:
        timeout_s: longest that any one call may take, in seconds.
    """

    timeout_s: float
    spans: list[Span] = field(default_factory=list)
    _running: dict[ray.ObjectRef, tuple[Call, float]] = field(default_factory=dict)
    _done: dict[ray.ObjectRef, Any] = field(default_factory=dict)

    def start(self, place: Place, method: str, ref: ray.ObjectRef) -> Call:
        """Watch a call from now on."""
        call = Call(place, method, ref)
        self._running[ref] = call, time.monotonic()
        return call

    def gather(self, *pending: Pending[Any]) -> list[Any]:
        """Wait for all of these; meanwhile a failure of any call, awaited here or not, is raised at once.

        Raises:
            WorkerFailed: some call failed or ran out of time.
        """
        wanted = {call.ref for one in pending for call in one.calls}
        while wanted - self._done.keys():
            self._wait_for_any()
        return [one.combine([self._done.pop(call.ref) for call in one.calls]) for one in pending]

    def _wait_for_any(self) -> None:
        oldest, started = min(self._running.values(), key=lambda entry: entry[1])
        left = started + self.timeout_s - time.monotonic()
        ready, _ = ray.wait(list(self._running), num_returns=1, timeout=max(left, 0.0))
        if not ready:
            late = [str(call.place) for call, since in self._running.values() if since <= started + 1.0]
            raise WorkerFailed(
                f"{oldest.method}: no answer within run.timeout_s = {self.timeout_s:g} s from {', '.join(late)}; "
                f"see {oldest.place.log}"
            )
        failures = self._take(ready)
        if failures:
            raise WorkerFailed(self._blame(failures))

    def _take(self, ready: Sequence[ray.ObjectRef]) -> list[_Failure]:
        """Move finished calls out of the running ones; those that failed come back."""
        failures = []
        for ref in ready:
            call, _ = self._running.pop(ref)
            try:
                timed: Timed = ray.get(ref)
            except RayError as error:
                failures.append(_Failure(call, _words(error), isinstance(error, RayActorError)))
                continue
            if timed.failure is not None:
                failures.append(_Failure(call, timed.failure.rstrip(), died=False))
                continue
            self.spans.append(Span(call.place, call.method, timed.began, timed.ended, timed.device_memory_gib))
            self._done[ref] = timed.value
        return failures

    def _blame(self, failures: list[_Failure]) -> str:
        """The message for the failure that caused the others.

        When a process dies, its peers' collectives break at once, often before Ray reports the death; so others are
        given a moment to come in, and a death is taken for the cause before a broken connection.
        """
        deadline = time.monotonic() + GRACE_S
        while self._running and (left := deadline - time.monotonic()) > 0:
            ready, _ = ray.wait(list(self._running), num_returns=1, timeout=left)
            failures += self._take(ready)
        cause = min(failures, key=lambda failure: failure.rank)
        others = sorted({str(failure.call.place) for failure in failures} - {str(cause.call.place)})
        also = f"\nthen also failed: {', '.join(others)}" if others else ""
        if cause.died:
            headline = f"{cause.call.place} died in {cause.call.method} (killed, or out of memory?): {cause.text}"
        else:
            headline = f"{cause.call.place} failed in {cause.call.method}:\n{cause.text}"
        return f"{headline}\nsee {cause.call.place.log}{also}"


@dataclass(frozen=True)
class _Failure:
    call: Call
    text: str
    died: bool

    @property
    def rank(self) -> int:
        """Lower is likelier the cause: a death, then an error of its own, then a connection that others broke."""
        broken = ("Connection closed by peer", "Connection reset by peer", "OwnerDied", "Broken pipe", "NCCL error")
        return 0 if self.died else 2 if any(sign in self.text for sign in broken) else 1


def _words(error: RayError) -> str:
    """The lines of a Ray error that say why: the first for a death, the last (a traceback's end) for all else."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    died = isinstance(error, RayActorError) and "constructor" not in lines[0]
    return lines[0] if died else "\n".join(lines[-12:])


def one(values: Sequence[Any]) -> Any:
    """The single value that is not None; several must be equal (replicas report the same)."""
    found = [value for value in values if value is not None]
    if not found or any(repr(value) != repr(found[0]) for value in found):  # by repr, since nan is not equal to itself
        raise RuntimeError(f"ranks that should report the same differ: {found}")
    return found[0]
