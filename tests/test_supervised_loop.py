"""The loop of training on examples, on a real run folder; no process is started: the model learns nothing."""

from __future__ import annotations

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

from megappo.cluster import dataflow
from megappo.cluster.calls import Pending
from megappo.config import load_supervised
from megappo.data.prompts import DataError
from megappo.report import trackers
from megappo.report.run_log import LogError
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


def run(folder: Path, model: Model, stop: StopRequest | None = None) -> bool:
    wanted = ("run.steps=5", "data.validation=[]", "run.trackers=[wandb]", f"run.dir={folder}")
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
