"""The loop of training on examples, on a real run folder; no process is started: the model learns nothing."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
from small_run import log_steps
from test_run_folder import Store
from test_supervised import make_folder
from test_trackers import Good, made

from megappo.check.supervised import supervised_folder_findings
from megappo.cluster import dataflow
from megappo.cluster.calls import Pending
from megappo.config import load_supervised
from megappo.data.examples import Examples
from megappo.data.prompts import DataError
from megappo.report import trackers
from megappo.report.run_log import LogError, read_log
from megappo.report.step_metrics import Metrics
from megappo.steps import NoProgress
from megappo.stop_request import StopRequest
from megappo.supervised import _Trainer, train_on_examples


class Model:
    """A group whose workers do nothing; one update fails, and in one someone asks to stop, if told so."""

    members = (None,)

    def __init__(self, fails: int = 0, asks: tuple[int, StopRequest] | None = None) -> None:
        self.updates, self.fails, self.asks = 0, fails, asks

    def update(self, *args: Any) -> Pending[Any]:
        self.updates += 1
        if self.updates == self.fails:
            raise FloatingPointError("the gradient norm is nan")
        if self.asks and self.updates == self.asks[0]:
            self.asks[1].ask()
        return Pending((), lambda results: {"critic/grad_norm": 1.0})

    def save(self, folder: str) -> Pending[Any]:
        Path(folder).mkdir()
        return Pending((), list)

    def load(self, folder: str) -> Pending[Any]:
        return Pending((), list)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("supervised") / "project")


@pytest.fixture(autouse=True)
def in_project(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setattr(dataflow, "ray", Store())
    monkeypatch.setattr(trackers, "TRACKERS", {"wandb": Good})
    made.clear()


def run(folder: Path, model: Model, stop: StopRequest | None = None, *overrides: str) -> bool:
    wanted = ("run.steps=5", "data.validation=[]", "run.trackers=[wandb]", f"run.dir={folder}", *overrides)
    trainer = _Trainer(load_supervised("config.yaml", wanted), "reward-train", stop or StopRequest())
    calls = SimpleNamespace(gather=lambda *pending: [one.combine([]) for one in pending])
    cluster: Any = SimpleNamespace(model=model, calls=calls)
    return trainer.run(cluster)


def test_a_run_that_fails_is_no_finished_one_for_its_trackers(tmp_path: Path) -> None:
    with pytest.raises(FloatingPointError):
        run(tmp_path, Model(fails=4))
    assert [made[-1].seen[-1], log_steps(tmp_path)] == [True, [0, 1, 2, 3]]
    assert run(tmp_path, Model())
    assert [made[-1].seen[-1], log_steps(tmp_path)] == [False, [0, 1, 2, 3, 4, 5]]


def test_a_run_goes_on_with_the_examples_that_it_began_with(tmp_path: Path, project: Path) -> None:
    train = project / "pairs.parquet"
    stored, table = train.read_bytes(), pq.read_table(train)
    with pytest.raises(FloatingPointError):
        run(tmp_path, Model(fails=3))
    try:
        pq.write_table(table.rename_columns(["prompt", "rejected", "chosen"]), train)
        with pytest.raises(DataError, match=r"data.train: its files hold 19 rows, .* began with 19 rows, sha256"):
            run(tmp_path, Model())
    finally:
        train.write_bytes(stored)
    assert run(tmp_path, Model())


def test_a_run_at_a_url_that_is_refused_leaves_no_thread(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/url"
    wanted = ("run.steps=5", f"run.dir={url}", f"run.work_dir={tmp_path}/here")
    (tmp_path / "here").mkdir()
    (tmp_path / "here/log.jsonl").write_text("{}\n")
    before = threading.enumerate()
    with pytest.raises(LogError):
        train_on_examples(load_supervised("config.yaml", wanted), "reward-train")
    assert threading.enumerate() == before and not (tmp_path / "url/.owner").exists()


def test_a_run_that_is_asked_to_stop_does_so_with_a_checkpoint(tmp_path: Path) -> None:
    stop = StopRequest()
    stop.ask()
    with pytest.raises(NoProgress):
        run(tmp_path, Model(), stop)
    stop.asked = False
    assert not run(tmp_path, Model(asks=(3, stop)), stop)
    assert log_steps(tmp_path) == [0, 1, 2, 3] and (tmp_path / "checkpoints/step_3/trainer.json").is_file()
    assert run(tmp_path, Model())
    assert log_steps(tmp_path) == [0, 1, 2, 3, 4, 5]


HELD_OUT = ("data.validation=[held_out.parquet]", "run.save_every=0", "run.validate_before=false")
"""Validation after the steps 2, 4 and 5."""


@pytest.fixture
def validated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that were validated; the loss is a number that is given."""
    steps: list[int] = []

    def validate(self: _Trainer, examples: Examples) -> Metrics:
        steps.append(self.step)
        return {"val/loss": 1 / (1 + self.step)}

    monkeypatch.setattr(_Trainer, "_validate", validate)
    return steps


def logged(folder: Path) -> list[tuple[int, dict[str, float]]]:
    timed = ("timing_s/", "perf/")
    return [
        (row["step"], {k: v for k, v in row["metrics"].items() if not k.startswith(timed)}) for row in read_log(folder)
    ]


def test_a_run_that_was_stopped_before_its_validation_has_it_when_it_goes_on(
    tmp_path: Path, validated: list[int]
) -> None:
    folder, stop = tmp_path / "parts", StopRequest()
    assert run(tmp_path / "whole", Model(), None, *HELD_OUT)
    assert validated == [2, 4, 5]
    validated.clear()
    assert not run(folder, Model(asks=(2, stop)), stop, *HELD_OUT)
    assert not validated and log_steps(folder) == [1] and made[-1].seen[-1] is False
    assert json.loads((folder / "checkpoints/step_2/trainer.json").read_text())["unvalidated"]["train/grad_norm"] == 1.0
    with pytest.raises(NoProgress):  # asked again before it has begun: there may be no time for the validation either
        run(folder, Model(), stop, *HELD_OUT)
    assert not validated
    stop = StopRequest()
    assert not run(folder, Model(asks=(3, stop)), stop, *HELD_OUT)  # in the last step
    assert validated == [2, 4] and log_steps(folder) == [1, 2, 3, 4]
    assert run(folder, Model(), None, *HELD_OUT)
    assert validated == [2, 4, 5] and logged(folder) == logged(tmp_path / "whole")
    assert not list(folder.glob("checkpoints/*/trainer.json.partial"))
    assert "unvalidated" not in (folder / "checkpoints/step_5/trainer.json").read_text()


def test_a_stop_during_the_validation_that_was_to_come_is_no_end_without_progress(
    tmp_path: Path, validated: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = StopRequest()
    assert not run(tmp_path, Model(asks=(2, stop)), stop, *HELD_OUT)
    stop = StopRequest()
    monkeypatch.setattr(_Trainer, "_validate", lambda self, examples: stop.ask() or {"val/loss": 0.5})
    assert not run(tmp_path, Model(), stop, *HELD_OUT)
    assert log_steps(tmp_path) == [1, 2]
    with pytest.raises(NoProgress):
        run(tmp_path, Model(), stop, *HELD_OUT)


def test_a_run_that_is_to_stop_at_once_does_not_validate(tmp_path: Path, validated: list[int]) -> None:
    stop = StopRequest()
    stop.ask()
    with pytest.raises(NoProgress):
        run(tmp_path, Model(), stop, *HELD_OUT, "run.validate_before=true")
    assert not validated


def test_the_last_step_alone_may_still_be_validated(tmp_path: Path, validated: list[int]) -> None:
    """Such a run is not finished, neither for ``check`` nor for the command."""
    stop = StopRequest()
    assert not run(tmp_path, Model(asks=(5, stop)), stop, *HELD_OUT)
    config = load_supervised("config.yaml", ("run.steps=5", f"run.dir={tmp_path}"))
    assert not [line for line in supervised_folder_findings(config) if "steps are done" in line]
    assert not _Trainer(config, "reward-train", stop).is_finished
    assert run(tmp_path, Model(), None, *HELD_OUT)
    assert [line for line in supervised_folder_findings(config) if "steps are done" in line]
    assert _Trainer(config, "reward-train", stop).is_finished
