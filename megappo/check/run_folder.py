"""The run's folder: whether it can be written, and whether what it holds can be gone on with."""

from __future__ import annotations

import importlib.util
import os
import re
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from megappo.check.findings import Advice, done, shown, under
from megappo.check.remote_folder import local_place, remote_folder_findings
from megappo.checkpoints import STATE_NAME, UNVALIDATED
from megappo.config import Config, ConfigError, RunConfig, load_config
from megappo.file_lock import NoFileLocks, lock

FIXED_ON_RESUME = (
    "run.seed",
    "data.train",
    "data.prompts_per_step",
    "data.max_prompt",
    "data.overlong",
    "data.shuffle",
    "roles.rollout.samples_per_prompt",
    "ppo.estimator",
    "ppo.mini_batch",
    "ppo.epochs",
)
"""Keys that a resumed run cannot change, besides the model and the adapters of each role: the weights, the place in the
data and the schedule would not be its own. Pools and layouts may change, as may lengths, rates and everything about
logging."""


TRACKER_PACKAGES = {"mlflow": "mlflow-skinny"}
"""What to install for a tracker, where that is not its name: MLflow's client alone is enough."""


def run_findings(config: Config) -> Iterator[str]:
    """The run folder, its trackers, and a run that it may hold."""
    run, folder = config.run, config.run.folder
    yield from place_findings(run)
    if run.restarts and run.save_every == 0 and run.steps > 1 and run.keep_best is None:
        yield Advice(
            f"run.save_every: 0 writes no checkpoint before the last step, so that each of the run.restarts: "
            f"{run.restarts} begins at the first: give run.save_every"
        )
    steps = checkpoint_steps(folder)
    if not steps:
        return
    try:
        stored = load_config(folder / "config.yaml")
    except ConfigError as error:
        yield f"run.dir: {folder} holds checkpoints of a run that cannot be read ({error.problems[0]}): choose another"
        return
    for dotted, old, new in _changes(stored, config):
        yield (
            f"{dotted}: {shown(new)} differs from {shown(old)}, with which the run in {folder} began: "
            "set it back, or choose another run.dir"
        )
    schedules = {optimizer.schedule for optimizer in config.ppo.optimizers.values()} - {"constant"}
    for schedule in sorted(schedules) if run.steps != stored.run.steps else ():
        yield Advice(
            f"run.steps: {run.steps} differs from {stored.run.steps}, with which the run in {folder} went on so far: "
            f"the learning rate jumps, as the {schedule} schedule ends at the last step (a constant one does not)"
        )
    if steps[-1] >= run.steps and not is_unvalidated(folder, steps[-1]):
        yield Advice(
            f"run.steps: {done(run.steps)}, as {folder} has a checkpoint of step {steps[-1]}: "
            "raise run.steps, or choose another run.dir"
        )


def place_findings(run: RunConfig) -> Iterator[str]:
    """Where any run leaves things: its folder, here and away from here, and its trackers."""
    yield from remote_folder_findings(run)
    yield from under("run.work_dir" if run.work_dir else "run.dir", run_folder_problems(run.folder))
    if run.is_remote and (place := local_place(run.dir)):
        yield from under("run.dir", run_folder_problems(place, locked=False))
    for tracker in run.trackers:
        if not is_installed(tracker):
            package = TRACKER_PACKAGES.get(tracker, tracker)
            yield f"run.trackers: {tracker} is not installed: pip install {package}, or leave it out"


def is_installed(module: str) -> bool:
    """Whether it can be imported; a mere folder of its name, as W&B leaves in the working directory, cannot."""
    found = importlib.util.find_spec(module)
    return found is not None and found.origin is not None


def _changes(stored: Config, config: Config) -> Iterator[tuple[str, Any, Any]]:
    """(key, old, new) of everything that a resumed run cannot change, and that changed."""
    models: dict[str, tuple[str, str]] = {}
    for name, role in config.roles.megatron.items():
        if name in stored.roles.megatron:  # a reference may come with a KL term, and go
            old, new = stored.model_folder(name), config.model_folder(name)
            if old != new:
                models[f"roles.{name}.model" if role.model else "model"] = (old, new)
            if (before := stored.roles.megatron[name].lora) != role.lora:
                yield f"roles.{name}.lora", before, role.lora
    yield from ((dotted, *values) for dotted, values in models.items())
    yield from differences(stored, config, FIXED_ON_RESUME)


def run_folder_problems(folder: Path, *, locked: bool = True) -> Iterator[str]:
    """Whether a run can write its folder, or make it in the nearest parent that exists.

    Args:
        locked: it has to keep others out of it as well, as it does where it works.
    """
    nearest = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not nearest.is_dir():
        yield f"{folder}: {nearest} is a file: choose another folder"
    elif not _takes_files(nearest):
        yield f"{folder}: {nearest} is not writable: choose another folder, or change its permissions"
    elif locked and (reason := _lacks_locks(nearest)):
        yield f"{folder}: {reason}"


def _takes_files(folder: Path) -> bool:
    """Whether a file can be made there, which leaves nothing: permissions alone let root write into /proc."""
    if not os.access(folder, os.W_OK | os.X_OK):
        return False
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def _lacks_locks(folder: Path) -> str:
    """Why a file there cannot be locked; empty if it can."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            lock(file)
    except NoFileLocks as error:
        return str(error)
    return ""


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps of a run's complete checkpoints, ascending."""
    try:
        names = [path.name for path in (folder / "checkpoints").iterdir() if (path / STATE_NAME).is_file()]
    except OSError:
        return []
    return sorted(int(match[1]) for match in map(re.compile(r"step_(\d+)").fullmatch, names) if match)


def is_unvalidated(folder: Path, step: int) -> bool:
    """Whether the validation of a run's checkpoint is still to come."""
    try:
        return f'"{UNVALIDATED}"' in (folder / "checkpoints" / f"step_{step}" / STATE_NAME).read_text(errors="replace")
    except OSError:  # the run says so
        return False


def differences(old: Any, new: Any, keys: Collection[str]) -> Iterator[tuple[str, Any, Any]]:
    """(key, old, new) of each dotted key whose values in two configurations differ."""
    for dotted in keys:
        before, after = old, new
        for name in dotted.split("."):
            before, after = getattr(before, name), getattr(after, name)
        if _absolute(before) != _absolute(after):
            yield dotted, before, after


def _absolute(value: Any) -> Any:
    """Paths made comparable; what is no path stays equal to itself only."""
    if isinstance(value, tuple):
        return tuple(map(_absolute, value))
    return os.path.abspath(value) if isinstance(value, str) else value
