"""TensorBoard, Weights & Biases and MLflow, each by its own library and its own environment variables.

To add a tracker, write a class with `log` and `close` here, put it into `TRACKERS`, and name it in `run.trackers`.
"""

from __future__ import annotations

import getpass
import importlib
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megappo import strict_yaml

_IMPORTING = threading.Lock()


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run.

    Attributes:
        folder: of the run; its name is the run's.
        config_text: the resolved YAML.
        resumed_at: the last step that counts if the run was resumed.
    """

    folder: Path
    config_text: str = ""
    resumed_at: int | None = None

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as plain values."""
        parsed = strict_yaml.parse(self.config_text, [])
        return parsed if isinstance(parsed, dict) else {}

    def known_id(self, tracker: str) -> str | None:
        """The id under which a tracker knows this run already."""
        path = self._id_path(tracker)
        return path.read_text().strip() or None if self.resumed_at is not None and path.is_file() else None

    def remember_id(self, tracker: str, run_id: str) -> None:
        """For when the run is resumed."""
        self._id_path(tracker).write_text(f"{run_id}\n")

    def _id_path(self, tracker: str) -> Path:
        return self.folder / f"{tracker}.id"


class Tracker(Protocol):
    """It may raise anything: see :class:`megappo.report.trackers.Trackers`."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a step's finite metrics."""

    def close(self, failed: bool) -> None:
        """Send the rest, and say how the run ended."""


class TensorBoard:
    """Event files under RUN/tensorboard. After a resume at step n, TensorBoard hides what was logged beyond n."""

    def __init__(self, run: TrackedRun) -> None:
        library = _library("torch.utils.tensorboard")
        purge_step = None if run.resumed_at is None else run.resumed_at + 1
        self.writer = library.SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge_step)
        if run.config_text and run.resumed_at is None:
            indented = "".join(f"    {line}\n" for line in run.config_text.splitlines())  # Markdown for "as it is"
            self.writer.add_text("config", indented, 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self, failed: bool) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A run of the project "megappo", with its files under RUN/wandb; WANDB_* variables change either.

    A resumed run goes on under its id. The library takes no step twice: those that a killed run had sent beyond its
    last checkpoint stay as they were sent.
    """

    def __init__(self, run: TrackedRun) -> None:
        # Its capture of the console would wrap the stdout of the whole process, and a question for a key would wait
        # for an answer for ever.
        os.environ.setdefault("WANDB_CONSOLE", "off")
        os.environ.setdefault("WANDB_LOGIN_TIMEOUT", "20")
        known = os.environ.get("WANDB_RUN_ID") or run.known_id("wandb") or secrets.token_hex(4)
        self.run = _library("wandb").init(
            project=os.environ.get("WANDB_PROJECT", "megappo"),
            name=os.environ.get("WANDB_NAME", run.folder.absolute().name),
            dir=os.environ.get("WANDB_DIR", str(run.folder)),
            resume=os.environ.get("WANDB_RESUME", "allow"),
            id=known,
        )
        run.remember_id("wandb", self.run.id)
        self.run.config.update(run.config, allow_val_change=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step >= self.run.step:
            self.run.log(dict(metrics), step=step, commit=True)

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


class MLflow:
    """A run of the experiment "megappo" in the file store RUN/mlruns; MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME,
    MLFLOW_EXPERIMENT_ID, MLFLOW_RUN_NAME and MLFLOW_RUN_ID change that.

    A resumed run goes on under its id. MLflow deletes no steps: of one that is logged twice the later value counts.
    """

    PARAMETERS_AT_ONCE = 100  # MLflow's limits
    PARAMETER_LENGTH = 500

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # else new versions refuse a folder as a store
        library = _library("mlflow")
        self.entities = library.entities
        stored_in = os.environ.get("MLFLOW_TRACKING_URI") or (run.folder / "mlruns").absolute().as_uri()
        self.client = library.MlflowClient(tracking_uri=stored_in)
        known = os.environ.get("MLFLOW_RUN_ID") or run.known_id("mlflow")
        self.run_id = known or self._create(run)
        run.remember_id("mlflow", self.run_id)
        self.client.update_run(self.run_id, status="RUNNING")

    def _create(self, run: TrackedRun) -> str:
        experiment = os.environ.get("MLFLOW_EXPERIMENT_ID")
        if not experiment:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "megappo")
            found = self.client.get_experiment_by_name(name)
            experiment = found.experiment_id if found else self.client.create_experiment(name)
        name = os.environ.get("MLFLOW_RUN_NAME", run.folder.absolute().name)
        tags = {"mlflow.user": getpass.getuser(), "mlflow.source.name": "megappo"}
        run_id = self.client.create_run(experiment, run_name=name, tags=tags).info.run_id
        leaves = [(key, str(value)[: self.PARAMETER_LENGTH]) for key, value in _leaves(run.config)]
        parameters = [self.entities.Param(mlflow_name(key), value) for key, value in leaves]
        for at in range(0, len(parameters), self.PARAMETERS_AT_ONCE):
            self.client.log_batch(run_id, params=parameters[at : at + self.PARAMETERS_AT_ONCE])
        return str(run_id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = round(time.time() * 1000)
        points = [self.entities.Metric(mlflow_name(name), value, now, step) for name, value in metrics.items()]
        self.client.log_batch(self.run_id, metrics=points)

    def close(self, failed: bool) -> None:
        self.client.set_terminated(self.run_id, status="FAILED" if failed else "FINISHED")


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


def mlflow_name(name: str) -> str:
    """A metric's name as MLflow allows it: ``mean@4`` becomes ``mean_at_4``, as with verl."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of nested mappings."""
    if not isinstance(tree, Mapping):
        yield prefix, tree
        return
    for name, child in tree.items():
        yield from _leaves(child, f"{prefix}.{name}" if prefix else str(name))


def _library(name: str) -> Any:
    with _IMPORTING:  # the libraries share others, and each tracker starts in a thread of its own
        return importlib.import_module(name)
