"""Each tracker has what it was given, by its own library; none can stop or slow down training."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_project import make_project

from megappo.check import run_folder
from megappo.report import trackers
from megappo.report.tracker_kinds import TrackedRun, mlflow_name
from megappo.report.trackers import Trackers


class Good:
    """Remembers what it was given."""

    def __init__(self, run: TrackedRun) -> None:
        self.seen: list[Any] = []
        made.append(self)

    def log(self, step: int, metrics: object) -> None:
        self.seen.append((step, metrics))

    def close(self, failed: bool) -> None:
        self.seen.append(failed)


made: list[Good] = []


class FailsAtStart(Good):
    def __init__(self, run: TrackedRun) -> None:
        raise SystemExit("no such\nserver")


class FailsToLog(Good):
    def log(self, step: int, metrics: object) -> None:
        raise OSError("disk full")


class FailsToClose(Good):
    def close(self, failed: bool) -> None:
        raise ValueError("not sent")


class Hangs(Good):
    def log(self, step: int, metrics: object) -> None:
        threading.Event().wait(600)


def test_failing_trackers_are_warned_about_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {kind.__name__: kind for kind in (FailsAtStart, FailsToLog, FailsToClose, Good, Hangs)}
    monkeypatch.setattr(trackers, "TRACKERS", kinds)
    made.clear()
    warnings: list[str] = []
    failing = {"tracker-FailsAtStart", "tracker-FailsToLog"}
    began = time.monotonic()
    live = Trackers([*kinds, "Good"], tmp_path, warn=warnings.append, patience_s=0.5)
    for step in (1, 2, 3):
        live.log(step, {"x": step / 2, "bad": math.nan, "worse": math.inf})
        wait_until(lambda: not failing & {thread.name for thread in threading.enumerate()})
    assert len(warnings) == 2 and "FailsAtStart" in warnings[0] and "FailsToLog" in warnings[1]
    live.close(failed=True)
    assert time.monotonic() - began < 10
    (good,) = [tracker for tracker in made if type(tracker) is Good]
    assert good.seen == [(1, {"x": 0.5}), (2, {"x": 1.0}), (3, {"x": 1.5}), True]
    assert [warning.split("failed")[0] for warning in warnings] == [
        f"the tracker {name} " for name in ("FailsAtStart", "FailsToLog", "FailsToClose", "Hangs")
    ]
    assert [warning.split("(")[1].split(")")[0] for warning in warnings] == [
        "SystemExit: no such server",
        "OSError: disk full",
        "ValueError: not sent",
        "it did not finish within 0.5 s",
    ]
    live.log(4, {"x": 1.0})
    live.close()
    assert len(warnings) == 4


def test_a_tracker_far_behind_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "TRACKERS", {"slow": Hangs})
    monkeypatch.setattr(trackers, "MOST_WAITING", 5)
    warnings: list[str] = []
    live = Trackers(["slow"], tmp_path, warn=warnings.append)
    for step in range(20):
        live.log(step, {})
    assert len(warnings) == 1 and "it is 5 steps behind" in warnings[0]
    live.close()  # at once: nobody is waited for


def test_unknown_tracker(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'comet' is not a tracker; known: mlflow, tensorboard, wandb"):
        Trackers(["comet"], tmp_path)


def follow_and_resume(names: list[str], run: Path) -> None:
    """Five steps of a run that is killed, then the last three again from the checkpoint of step 2."""
    warnings: list[str] = []
    run.mkdir()
    config = "run: {steps: 5}\nppo: {actor_lr: 1e-6, clip: 0.2}\nmodel: m\n"
    for resumed_at, value in ((None, 1.0), (2, 10.0)):
        live = Trackers(names, run, config_text=config, resumed_at=resumed_at, warn=warnings.append)
        for step in range(1 if resumed_at is None else 3, 6):
            live.log(step, {"actor/pg_loss": step * value, "val-core/sums/acc/mean@4": 0.5, "bad": math.nan})
        live.close(failed=resumed_at is None)
    assert warnings == []


def test_tensorboard(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    follow_and_resume(["tensorboard"], tmp_path / "demo")
    events = accumulator.EventAccumulator(str(tmp_path / "demo" / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["actor/pg_loss", "val-core/sums/acc/mean@4"]
    points = [(event.step, event.value) for event in events.Scalars("actor/pg_loss")]
    assert points == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0), (5, 50.0)]


def test_wandb_offline_and_mlflow_in_files_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    pytest.importorskip("mlflow")
    for variable in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_RUN_ID", "WANDB_DIR", "WANDB_CONSOLE"):
        monkeypatch.delenv(variable, raising=False)
    for variable in ("TRACKING_URI", "EXPERIMENT_NAME", "EXPERIMENT_ID", "RUN_ID", "RUN_NAME", "ALLOW_FILE_STORE"):
        monkeypatch.delenv(f"MLFLOW_{variable}", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = tmp_path / "demo"
    follow_and_resume(["wandb", "mlflow"], run)
    see_wandb(run)
    see_mlflow(run)


def see_wandb(run: Path) -> None:
    """Two offline folders of one run, which `wandb sync` sends."""
    first, second = sorted((run / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    for path in (first, second):  # its own process writes the last records after the library has returned
        wait_until(lambda path=path: any(record.HasField("exit") for record in wandb_records(path)))
    known = (run / "wandb.id").read_text().strip()
    assert first.name == second.name == f"run-{known}.wandb"
    assert [row["actor/pg_loss"] for row in wandb_history(first)] == ["1", "2", "3", "4", "5"]
    assert [(row["_step"], row["actor/pg_loss"]) for row in wandb_history(second)] == [
        (str(step), str(step * 10)) for step in (3, 4, 5)
    ]
    (start,) = [record.run for record in wandb_records(first) if record.HasField("run")]
    assert (start.project, start.display_name, start.run_id) == ("megappo", "demo", known)
    config = {
        update.key or "/".join(update.nested_key): update.value_json
        for record in wandb_records(first)
        for update in [*record.config.update, *record.run.config.update]
    }
    assert json.loads(config["model"]) == "m"
    assert json.loads(config["ppo"]) == {"actor_lr": 1e-6, "clip": 0.2}
    ends = [record.exit for path in (first, second) for record in wandb_records(path) if record.HasField("exit")]
    assert [end.exit_code for end in ends] == [1, 0]


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def wandb_history(path: Path) -> list[dict[str, str]]:
    found = [record.history for record in wandb_records(path) if record.HasField("history")]
    return [{item.key or "/".join(item.nested_key): item.value_json for item in history.item} for history in found]


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: LevelDB's log format (blocks of 32 KiB) after a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if (room := 32768 - at % 32768) < 7:
            at += room
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind == 0 or at > len(content):  # not written yet
            return
        if kind in (1, 4):  # a whole record, or the last piece of one
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def see_mlflow(run: Path) -> None:
    """One run that has every step, of those that came twice both."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(run / "mlruns").as_uri())
    (experiment,) = client.search_experiments(filter_string="name = 'megappo'")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_id == (run / "mlflow.id").read_text().strip()
    assert (found.info.run_name, found.info.status) == ("demo", "FINISHED")
    assert found.data.params == {"run.steps": "5", "ppo.actor_lr": "1e-06", "ppo.clip": "0.2", "model": "m"}
    assert found.data.metrics == {"actor/pg_loss": 50.0, "val-core/sums/acc/mean_at_4": 0.5}
    history = client.get_metric_history(found.info.run_id, "actor/pg_loss")
    assert sorted((point.step, point.value) for point in history) == [
        *((1, 1.0), (2, 2.0), (3, 3.0), (3, 30.0), (4, 4.0), (4, 40.0), (5, 5.0), (5, 50.0)),
    ]


def test_mlflow_names() -> None:
    assert mlflow_name("val-core/org/set (x)/acc/best@4/mean") == "val-core/org/set _x_/acc/best_at_4/mean"


def test_check_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    project = make_project(tmp_path)
    (tmp_path / "left_by_a_tracker").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert run_folder.is_installed("json") and not run_folder.is_installed("absent")
    assert not run_folder.is_installed("left_by_a_tracker"), "a folder in the working directory is no library"
    monkeypatch.setattr(run_folder, "is_installed", lambda module: module == "wandb")
    assert project.report("run.trackers=[wandb, mlflow]").errors == (
        "run.trackers: mlflow is not installed: pip install mlflow-skinny, or leave it out",
    )
