"""Remote calls that are watched together: the first one that fails ends the run, with a name on it."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import RayActorError, RayError

from megappo.cluster.watch import Address, Sight, look

Result = TypeVar("Result")

GRACE_S = 2.0
"""How long further failures are collected after the first, in seconds."""

NAMED = 8
"""Of so many places a message gives the names; the others are counted."""


class WorkerFailed(RuntimeError):
    """A worker raised, died or did not answer in time; the message names role, rank and node."""


class WorkerLost(WorkerFailed):
    """It died, lost its connections or did not answer: another in its place may well go on.

    Attributes:
        died: those that are known to be dead, where nothing else went wrong.
    """

    def __init__(self, message: str, died: frozenset[Place] = frozenset()) -> None:
        super().__init__(message)
        self.died = died


@dataclass(frozen=True)
class Place:
    """Who a call runs on; ``watch`` tells what it is doing."""

    role: str
    rank: int
    pool: str
    node: str
    log: str
    watch: Address | None = field(default=None, compare=False, repr=False)

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
        timeout_s: longest that any one call may take, in seconds. The time of one that has to wait for another of the
            same process begins when that has ended.
        heartbeat_s: after so many seconds without an answer, what all are doing is printed, and again after as many;
            0: never.
    """

    timeout_s: float
    heartbeat_s: float = 0.0
    spans: list[Span] = field(default_factory=list)
    _running: dict[ray.ObjectRef, tuple[Call, float]] = field(default_factory=dict)
    _done: dict[ray.ObjectRef, Any] = field(default_factory=dict)

    def start(self, place: Place, method: str, ref: ray.ObjectRef, *, limited: bool = True) -> Call:
        """Watch a call from now on; if it is not limited, its time only begins with :meth:`limit`."""
        call = Call(place, method, ref)
        self._running[ref] = call, time.monotonic() if limited else math.inf
        return call

    def limit(self, call: Call) -> None:
        """Let the time begin that a call may take."""
        if call.ref in self._running:
            self._running[call.ref] = call, time.monotonic()

    def gather(self, *pending: Pending[Any]) -> list[Any]:
        """Wait for all of these; meanwhile a failure of any call, awaited here or not, is raised at once.

        Raises:
            WorkerLost: a worker died or ran out of time.
            WorkerFailed: some call failed otherwise.
        """
        wanted = {call.ref for one in pending for call in one.calls}
        while wanted - self._done.keys():
            self._wait_for_any()
        return [one.combine([self._done.pop(call.ref) for call in one.calls]) for one in pending]

    def forget(self, calls: Iterable[Call]) -> None:
        """Wait for these no longer."""
        for call in calls:
            self._running.pop(call.ref, None)
            self._done.pop(call.ref, None)

    def _wait_for_any(self) -> None:
        oldest, started = min(self._running.values(), key=lambda entry: entry[1])
        beat = self.heartbeat_s or math.inf
        ready: Sequence[ray.ObjectRef] = ()
        while not ready:
            left = max(started + self.timeout_s - time.monotonic(), 0.0)
            pause = min(left, beat)
            ready, _ = ray.wait(list(self._running), num_returns=1, timeout=None if math.isinf(pause) else pause)
            if not ready and left <= beat:
                raise WorkerLost(self._lateness(oldest, started))
            if not ready:
                print(self._slowness(oldest), file=sys.stderr, flush=True)
        failures = self._take(ready)
        if failures:
            raise self._blame(failures)

    def _lateness(self, oldest: Call, started: float) -> str:
        """The message for calls that took too long: those that others wait for come first."""
        due = {str(call.place): call.place for call, since in self._running.values() if since <= started + 1.0}
        sights = self._sights()
        late = [sight.name for sight in sights if sight.late and sight.name in due] or list(due)
        return (
            f"{oldest.method}: no answer within run.timeout_s = {self.timeout_s:g} s from {_few(late)}; "
            f"see {due[late[0]].log}\n{_table(sights)}"
        )

    def _slowness(self, oldest: Call) -> str:
        """What a person who follows the run reads before the limit has come."""
        return (
            f"{oldest.method}: nothing has come in the last {self.heartbeat_s:g} s; run.timeout_s is "
            f"{self.timeout_s:g} s\n{_table(self._sights())}"
        )

    def _sights(self) -> Sequence[Sight]:
        """What those are doing that have something to do."""
        return look({str(call.place): call.place.watch for call, _ in self._running.values()})

    def _take(self, ready: Sequence[ray.ObjectRef]) -> list[_Failure]:
        """Move finished calls out of the running ones; those that failed come back."""
        failures = []
        for ref in ready:
            call, _ = self._running.pop(ref)
            self._begin_next(call.place)
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

    def _begin_next(self, place: Place) -> None:
        """Let the time begin of calls that had to wait for one which has ended."""
        for ref, (call, since) in self._running.items():
            if call.place.log == place.log and not math.isinf(since):  # each process has a log of its own
                self._running[ref] = call, time.monotonic()

    def _blame(self, failures: list[_Failure]) -> WorkerFailed:
        """The error that tells of the failure which caused the others.

        When a process dies, its peers' collectives break at once, often before Ray reports the death; so others are
        given a moment to come in, and a death is taken for the cause before a broken connection.
        """
        deadline = time.monotonic() + GRACE_S
        while self._running and (left := deadline - time.monotonic()) > 0:
            ready, _ = ray.wait(list(self._running), num_returns=1, timeout=left)
            failures += self._take(ready)
        cause = min(failures, key=lambda failure: (failure.rank, failure.is_echo))
        others = sorted({str(failure.call.place) for failure in failures} - {str(cause.call.place)})
        also = f"\nthen also failed: {_few(others)}" if others else ""
        if cause.died:
            headline = f"{cause.call.place} died in {cause.call.method} (killed, or out of memory?): {cause.text}"
        elif cause.broke_device:
            headline = f"{cause.call.place}: its device broke in {cause.call.method}:\n{cause.text}"
        else:
            headline = f"{cause.call.place} failed in {cause.call.method}:\n{cause.text}"
        message = f"{headline}\nsee {cause.call.place.log}{also}"
        if cause.rank == _OWN_ERROR:
            return WorkerFailed(message)
        if cause.rank == _BROKEN and self._running:  # those who are still at it may be what the others waited for
            message += f"\n{_table(self._sights())}"
        alone = all(failure.died for failure in failures)
        return WorkerLost(message, frozenset(failure.call.place for failure in failures) if alone else frozenset())


_DEATH, _OWN_ERROR, _BROKEN = range(3)

BROKEN_BY_OTHERS = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL error"),
    *("OwnerDied", "ObjectLost", "ObjectReconstructionFailed"),
    *("Timed out waiting", "Watchdog caught collective operation timeout", "TransferError:"),
)
"""What failures say whose cause is another rank's."""
DEVICE_FAULTS = tuple(
    f"CUDA error: {fault}"
    for fault in (
        *("uncorrectable ECC error", "uncorrectable NVLink error", "hardware stack error"),
        *("unspecified launch failure", "unknown error"),
    )
)
"""What failures say of a device that broke: as good as a death, since another may be had, or this one after a reset."""


@dataclass(frozen=True)
class _Failure:
    call: Call
    text: str
    died: bool

    @property
    def broke_device(self) -> bool:
        """Whether it is the device's rather than the program's."""
        return any(sign in self.text for sign in DEVICE_FAULTS)

    @property
    def is_echo(self) -> bool:
        """Whether it may come of another one's failure, which closed its connections."""
        return "and is gone" in self.text

    @property
    def rank(self) -> int:
        """Lower is likelier the cause: a death, then an error of its own, then a connection that others broke."""
        if self.died or self.broke_device:
            return _DEATH
        return _BROKEN if any(sign in self.text for sign in BROKEN_BY_OTHERS) else _OWN_ERROR


def _few(names: Sequence[str]) -> str:
    """The first names, and how many others there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _table(sights: Sequence[Sight]) -> str:
    """Late ones first."""
    width = max(len(sight.name) for sight in sights)
    rows = sorted(sights, key=lambda sight: not sight.late)
    return "\n".join(f"  {sight.name:<{width}}  {sight.doing}" for sight in rows)


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
