"""The run's own record: RUN/log.jsonl (metrics, one object a step) and RUN/samples.jsonl (sampled generations).

Both files only grow, and a line is on the disk before the next step starts. A process that is killed while writing
leaves at most one torn last line: readers skip it, and the next writer cuts it off. A resumed run first calls
`truncate_after` with the step of its checkpoint, so that every step is in the log exactly once.

JSON knows no NaN or infinity: such values are written as null, and read back as NaN.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

LOG_NAME = "log.jsonl"
SAMPLES_NAME = "samples.jsonl"


class LogError(ValueError):
    """A line of a run's own record is not what a run writes; the message names file and line."""


class RunLog:
    """Writes RUN/log.jsonl and RUN/samples.jsonl; makes the folder where it is missing."""

    def __init__(self, run_dir: str | Path) -> None:
        """Go on with the files that are there.

        Raises:
            LogError: somebody has edited them.
        """
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.log_path = self.run_dir / LOG_NAME
        self.samples_path = self.run_dir / SAMPLES_NAME
        for path in (self.log_path, self.samples_path):
            _cut_torn_line(path)
        read_log(run_dir), read_samples(run_dir)

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds the line of one step: {"step": step, "time": unix seconds, "metrics": {name: number or null}}."""
        numbers = {name: _finite_or_none(value) for name, value in metrics.items()}
        _append_lines(self.log_path, [{"step": step, "time": time.time(), "metrics": numbers}])

    def log_samples(self, samples: Iterable[Mapping[str, Any]]) -> None:
        """Adds sampled generations: "step", "kind" ("train" or "validation"), "prompt", "response", "score",
        "ground_truth"; other keys are kept. Values that JSON does not know are written as their text."""
        rows = [{name: _plain(value) for name, value in sample.items()} for sample in samples]
        _append_lines(self.samples_path, rows)

    def truncate_after(self, step: int, *, validated: bool = True) -> int:
        """Drops every line of a later step than `step` from both files, each atomically. Returns the number of
        log lines dropped. -1 empties the log. validated: whether the step's own line, and samples of its validation,
        stay; else they are still to come."""
        dropped = _keep_lines(self.log_path, lambda row: row.get("step", -1) <= (step if validated else step - 1))
        _keep_lines(
            self.samples_path,
            lambda row: (
                (at := row.get("step", -1)) < step or (at == step and (validated or row.get("kind") == "train"))
            ),
        )
        return dropped


def read_log(run_dir: str | Path) -> list[dict[str, Any]]:
    """The objects of RUN/log.jsonl in file order, null read as NaN; empty where there is no log yet.

    Raises LogError, naming file and line, if a line other than a torn last one is not a log object.
    """
    path = Path(run_dir) / LOG_NAME
    rows = _read_lines(path)
    for number, row in enumerate(rows, start=1):
        metrics = row.get("metrics")
        if not isinstance(row.get("step"), int) or not isinstance(metrics, dict):
            raise LogError(f'{path}:{number}: not a log object with "step" and "metrics"; was the file edited?')
        if wrong := [name for name, value in metrics.items() if not isinstance(value, int | float | None)]:
            raise LogError(f"{path}:{number}: {wrong[0]} is {metrics[wrong[0]]!r}, not a number; was the file edited?")
        row["metrics"] = {name: math.nan if value is None else value for name, value in row["metrics"].items()}
    return rows


def read_samples(run_dir: str | Path) -> list[dict[str, Any]]:
    """The objects of RUN/samples.jsonl in file order; empty where there are none. Raises as `read_log`."""
    path = Path(run_dir) / SAMPLES_NAME
    rows = _read_lines(path)
    for number, row in enumerate(rows, start=1):
        if not isinstance(row.get("step", -1), int):
            raise LogError(f"{path}:{number}: step is {row['step']!r}, not a whole number; was the file edited?")
    return rows


def _finite_or_none(value: float) -> float | int | None:
    number = value if isinstance(value, (int, float)) else float(value)  # NumPy and torch scalars
    return number if math.isfinite(number) else None


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    try:
        return _finite_or_none(value)
    except (TypeError, ValueError):
        return str(value)


def _append_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    try:
        # backslashreplace: a response cut inside a character may hold half of a surrogate pair.
        with open(path, "ab") as file:
            file.write(text.encode("utf-8", "backslashreplace"))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # a full disk is found while writing, where Python names no file
        raise OSError(error.errno, error.strerror, str(path)) from None


def _read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    *lines, _torn = path.read_bytes().split(b"\n")  # what follows the last newline is torn, or empty
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise LogError(f"{path}:{number}: not a JSON object ({error}); delete the line to read on") from None
        if not isinstance(row, dict):
            raise LogError(f"{path}:{number}: not a JSON object; delete the line to read on")
        rows.append(row)
    return rows


def _cut_torn_line(path: Path) -> None:
    if not path.is_file():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with open(path, "r+b") as file:
            file.truncate(whole)
            os.fsync(file.fileno())


def _keep_lines(path: Path, stays: Callable[[dict[str, Any]], bool]) -> int:
    rows = _read_lines(path)
    kept = [row for row in rows if stays(row)]
    if len(kept) == len(rows):
        return 0
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    temporary.touch()
    _append_lines(temporary, kept)
    os.replace(temporary, path)
    return len(rows) - len(kept)
