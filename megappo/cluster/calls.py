"""Remote calls that are watched together: the first one that fails ends the run, with a name on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import RayError

Result = TypeVar("Result")


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
    """What every worker method returns: its value or the traceback of its failure, and when it ran (Unix seconds)."""

    value: Any
    began: float
    ended: float
    failure: str | None = None


@dataclass(frozen=True)
class Span:
    """When a worker was busy with what."""

    place: Place
    method: str
    began: float
    ended: float


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
        while missing := wanted - self._done.keys():
            self._wait_for_any()
            del missing
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
        for ref in ready:
            call, _ = self._running.pop(ref)
            timed = _value_of(call)
            self.spans.append(Span(call.place, call.method, timed.began, timed.ended))
            self._done[ref] = timed.value


def _value_of(call: Call) -> Timed:
    try:
        timed = ray.get(call.ref)
    except RayError as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise WorkerFailed(
            f"{call.place} died in {call.method} (killed, or out of memory?): {lines[0].strip()}; see {call.place.log}"
        ) from None
    if timed.failure is not None:
        raise WorkerFailed(f"{call.place} failed in {call.method}:\n{timed.failure.rstrip()}\nsee {call.place.log}")
    return timed


def one(values: Sequence[Any]) -> Any:
    """The single value that is not None; several must be equal (replicas report the same)."""
    found = [value for value in values if value is not None]
    if not found or any(value != found[0] for value in found):
        raise RuntimeError(f"ranks that should report the same differ: {found}")
    return found[0]
