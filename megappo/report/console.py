"""What a person sees while a run goes on: a block at the start, one line a step, and nothing else.

On a terminal, warnings and failures have colour; in a file or a pipe the text is plain. NO_COLOR is honoured.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TextIO

from megappo.report.figures import main_scores
from megappo.report.roles import RoleRow

BOLD, DIM, YELLOW, GREEN = "1", "2", "33", "32"
RECENT_STEPS = 20  # the time left is estimated from these

# (label, metric names of which the first present is shown, format). A missing metric leaves its place blank.
COLUMNS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("score", ("critic/score/mean",), "6.3f"),
    ("kl", ("actor/reward_kl_penalty", "actor/kl_loss", "actor/ppo_kl"), "8.5f"),
    ("entropy", ("actor/entropy",), "6.3f"),
    ("length", ("response_length/mean",), "6.1f"),
    ("pg", ("actor/pg_loss",), "8.4f"),
    ("vf", ("critic/vf_loss",), "7.4f"),
)
NOT_PHASES = ("timing_s/step", "timing_s/testing", "timing_s/save_checkpoint")  # the whole, and what is extra to a step
TRAIN_PHASES = ("timing_s/update_critic", "timing_s/update_actor")


def duration(seconds: float) -> str:
    """47 s, 2 min 05 s, 3 h 07 min."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def validation_scores(metrics: Mapping[str, float]) -> dict[str, float]:
    """The main validation metrics of a step, short name to value: val-core/gsm8k/acc/mean@1 becomes "gsm8k acc".

    A data source that reports accuracy is shown by it; otherwise by its reward.
    """
    return {label: metrics[name] for name, label in main_scores(metrics).items()}


class Console:
    """Prints the progress of one run.

    total_steps: the step at which the run is finished. stream: stdout by default. color: by default if the stream is
    a terminal. clock: seconds, for tests.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        stream: TextIO | None = None,
        color: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps = total_steps
        self.stream = sys.stdout if stream is None else stream
        self.color = self.stream.isatty() and "NO_COLOR" not in os.environ if color is None else color
        self._clock = clock
        self._started = clock()
        self._step_times: deque[float] = deque(maxlen=RECENT_STEPS)
        self._first_validation: dict[str, float] = {}
        self._last_validation: dict[str, float] = {}

    def start(self, title: str, roles: Sequence[RoleRow], facts: Mapping[str, object] | None = None) -> None:
        """The block at the start: a title, facts ("model: ...") and a table of the roles."""
        self._print(self._paint(title, BOLD))
        for name, value in (facts or {}).items():
            self._print(f"  {name:<9}  {value}")
        if roles:
            table = [("role", "pool", "devices", "layout")]
            table += [(row.role, row.pool, str(row.devices or "-"), row.layout) for row in roles]
            widths = [max(len(line[column]) for line in table) for column in range(3)]
            for number, (role, pool, devices, layout) in enumerate(table):
                line = f"  {role:<{widths[0]}}  {pool:<{widths[1]}}  {devices:>{widths[2]}}  {layout}"
                self._print(self._paint(line, DIM) if number == 0 else line)

    def went_before(self, log: Iterable[Mapping[str, Any]]) -> None:
        """Take the first validation from the log of the processes before this one, if they had any."""
        scores = (validation_scores(row["metrics"]) for row in log)
        self._first_validation = next(filter(None, scores), self._first_validation)

    def status(self, text: str) -> None:
        """A phase outside the loop, such as "starting 11 processes", with the time since the start."""
        self._print(self._paint(f"[{duration(self._clock() - self._started):>12}] ", DIM) + text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """The line of one step. For step 0 (before training) only the validation is shown."""
        scores = validation_scores(metrics)
        if scores:
            self._first_validation = self._first_validation or scores
            self._last_validation = scores
        if step > 0:
            self._print(self._step_line(step, metrics))
        if scores:
            text = ", ".join(f"{name} {value:.4f}" for name, value in scores.items())
            self._print(self._paint(f"{'':>5}validation at step {step}: {text}", GREEN))
        bad = [name for name, value in metrics.items() if _is_loss(name) and not math.isfinite(value)]
        if bad:
            self.warn(f"step {step}: not a finite number: {', '.join(bad)}")

    def warn(self, text: str) -> None:
        self._print(self._paint(f"WARNING: {text}", YELLOW))

    def finish(self, text: str = "") -> None:
        """The last lines: the time taken, validation before and after, and whatever else the caller says."""
        self._print(self._paint(f"finished in {duration(self._clock() - self._started)}", BOLD))
        for name, after in self._last_validation.items():
            before = self._first_validation.get(name, math.nan)
            self._print(f"  validation {name}: {before:.4f} -> {after:.4f}")
        if text:
            self._print(text)

    def _step_line(self, step: int, metrics: Mapping[str, float]) -> str:
        width = len(str(self.total_steps))
        parts = [f"step {step:>{width}}/{self.total_steps}"]
        for label, names, form in COLUMNS:
            value = next((metrics[name] for name in names if name in metrics), None)
            blank = " " * int(form.split(".")[0])
            parts.append(f"{label} {blank if value is None else format(value, form)}")
        generate = metrics.get("timing_s/gen", math.nan)
        sync = metrics.get("timing_s/update_weights", math.nan)
        whole = metrics.get("timing_s/step", metrics.get("perf/time_per_step", math.nan))
        if math.isfinite(whole):
            self._step_times.append(whole)
        train = _train_time(metrics, whole)
        parts.append(f"| gen {generate:5.2f} train {train:5.2f} sync {sync:5.2f} step {whole:6.2f} s")
        if self._step_times and step < self.total_steps:
            left = statistics.median(self._step_times) * (self.total_steps - step)
            parts.append(f"| left {duration(left)}")
        return "  ".join(parts).replace("nan", "  -")

    def _paint(self, text: str, code: str) -> str:
        return f"\033[{code}m{text}\033[0m" if self.color else text

    def _print(self, text: str) -> None:
        print(text, file=self.stream, flush=True)


def _is_loss(name: str) -> bool:
    return name.endswith(("_loss", "/grad_norm", "/score/mean"))


def _train_time(metrics: Mapping[str, float], whole: float) -> float:
    """Seconds in the two updates: their sum where they take turns, the longer one where they run at the same time."""
    times = [metrics[name] for name in TRAIN_PHASES if name in metrics]
    if not times:
        return math.nan
    one_after_the_other = sum(value for name, value in metrics.items() if _is_phase(name)) <= 1.02 * whole
    return sum(times) if one_after_the_other else max(times)


def _is_phase(name: str) -> bool:
    return name.startswith("timing_s/") and name not in NOT_PHASES
