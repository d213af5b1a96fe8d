"""Trackers: other places that a step's metrics go to. They are a convenience, so none may ever stop training.

Each works in a thread of its own: training neither waits for a slow server nor is held up by one that hangs.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType

from megappo.report.tracker_kinds import TRACKERS, TrackedRun, Tracker

MOST_WAITING = 1000
"""Steps that a tracker may be behind."""


class Trackers:
    """The trackers of one run, as a context manager; what is raised in it is a run that failed.

    One that fails, at the start or later, is warned about once and left out after that.

    names: keys of `TRACKERS`. config_text: the resolved YAML, shown where a tracker can. resumed_at: the last step
    that counts if the run was resumed. warn: called with one line of text, by the thread that calls `log` or `close`.
    patience_s: the time that all trackers together have to send the rest at the end.
    Raises ValueError for an unknown name.
    """

    def __init__(
        self,
        names: Iterable[str],
        run_dir: str | Path,
        *,
        config_text: str = "",
        resumed_at: int | None = None,
        warn: Callable[[str], None] = print,
        patience_s: float = 60.0,
    ) -> None:
        self._warn, self._patience_s = warn, patience_s
        self._live: dict[str, _Worker] = {}
        run = TrackedRun(Path(run_dir), config_text, resumed_at)
        for name in dict.fromkeys(names):
            if name not in TRACKERS:
                raise ValueError(f"run.trackers: {name!r} is not a tracker; known: {', '.join(sorted(TRACKERS))}")
            self._live[name] = _Worker(name, TRACKERS[name], run)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand a step's metrics to every tracker; those that are not finite are in log.jsonl only."""
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        for name, worker in list(self._live.items()):
            worker.waiting.put((step, finite))
            if worker.error is not None:
                self._give_up(name, f"{type(worker.error).__name__}: {worker.error}")
            elif worker.waiting.qsize() > MOST_WAITING:
                self._give_up(name, f"it is {MOST_WAITING} steps behind")

    def close(self, *, failed: bool = False) -> None:
        """Wait until everything is sent, but not longer than there is patience. failed: the run did not end well."""
        for worker in self._live.values():
            worker.waiting.put(failed)
        until = time.monotonic() + self._patience_s
        for name, worker in list(self._live.items()):
            worker.join(max(until - time.monotonic(), 0.0))
            if worker.error is not None:
                self._give_up(name, f"{type(worker.error).__name__}: {worker.error}")
            elif worker.is_alive():
                self._give_up(name, f"it did not finish within {self._patience_s:g} s")
        self._live.clear()

    def __enter__(self) -> Trackers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(failed=value is not None)

    def _give_up(self, name: str, why: str) -> None:
        del self._live[name]
        self._warn(
            f"the tracker {name} failed and gets nothing more in this run ({' '.join(why.split())}); training goes on, "
            "and log.jsonl has every step"
        )


class _Worker(threading.Thread):
    """One tracker at work.

    Attributes:
        waiting: (step, metrics) to be logged; at the end, whether the run failed.
        error: what ended it early.
    """

    def __init__(self, name: str, make: Callable[[TrackedRun], Tracker], run: TrackedRun) -> None:
        super().__init__(name=f"tracker-{name}", daemon=True)  # one that hangs does not keep the process
        self.waiting: queue.SimpleQueue[tuple[int, Mapping[str, float]] | bool] = queue.SimpleQueue()
        self.error: BaseException | None = None
        self._make, self._run = make, run
        self.start()

    def run(self) -> None:
        try:
            tracker = self._make(self._run)
            while not isinstance(item := self.waiting.get(), bool):
                tracker.log(*item)
            tracker.close(failed=item)
        except BaseException as error:  # SystemExit too: libraries may
            self.error = error
