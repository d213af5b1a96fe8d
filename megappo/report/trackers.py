"""Trackers: other places that a step's metrics go to. They are a convenience, so none may ever stop training.

A tracker is a class with `log` and `close`, known by the name that a user writes under `run.trackers`. To add one,
write the class and put it into `TRACKERS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol


class Tracker(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files under RUN/tensorboard. After a resume at step n, TensorBoard hides what was logged beyond n."""

    def __init__(self, run_dir: Path, config_text: str, resumed_at: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # needs the package tensorboard

        purge_step = None if resumed_at is None else resumed_at + 1
        self.writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge_step)
        if config_text and resumed_at is None:
            indented = "".join(f"    {line}\n" for line in config_text.splitlines())  # Markdown for "as it is"
            self.writer.add_text("config", indented, 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if math.isfinite(value):
                self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


TRACKERS: dict[str, Callable[[Path, str, int | None], Tracker]] = {"tensorboard": TensorBoard}


class Trackers:
    """The trackers of one run. One that fails, at the start or later, is warned about once and left out after that.

    names: keys of `TRACKERS`. config_text: the resolved YAML, shown where a tracker can. resumed_at: the last step
    that counts if the run was resumed. warn: called with one line of text.
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
    ) -> None:
        self._warn = warn
        self._live: dict[str, Tracker] = {}
        for name in names:
            if name not in TRACKERS:
                raise ValueError(f"run.trackers: {name!r} is not a tracker; known: {', '.join(sorted(TRACKERS))}")
            try:
                self._live[name] = TRACKERS[name](Path(run_dir), config_text, resumed_at)
            except Exception as error:
                self._give_up(name, error)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, tracker in list(self._live.items()):
            try:
                tracker.log(step, metrics)
            except Exception as error:
                self._give_up(name, error)

    def close(self) -> None:
        for name, tracker in list(self._live.items()):
            try:
                tracker.close()
            except Exception as error:
                self._give_up(name, error)
        self._live.clear()

    def _give_up(self, name: str, error: Exception) -> None:
        self._live.pop(name, None)
        self._warn(
            f"the tracker {name} failed and gets nothing more in this run"
            f" ({type(error).__name__}: {error}); training goes on, and log.jsonl has every step"
        )
