"""A run's folder by itself, without workers: its lock, what is read of a batch, and files that are whole or absent."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_run import CONFIG, make_tiny_model

from megappo.check.run_folder import place_findings
from megappo.cluster import dataflow
from megappo.cluster.dataflow import Batch, put_table
from megappo.config import Config, load_config
from megappo.data import batch as rows_of
from megappo.data.arithmetic import write_arithmetic
from megappo.data.requests import make_requests
from megappo.report import rollout_dump
from megappo.report.run_log import read_samples
from megappo.report.step_metrics import batch_metrics
from megappo.run import SAMPLES, Run, changed_settings, picked
from megappo.run_lock import RunFolderError, RunInUse, RunLock


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_arithmetic(tmp_path / "data", train=20, validation=9, digits=1)
    make_tiny_model().make_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


def config(*overrides: str) -> Config:
    return load_config("config.yaml", ["run.trackers=[]", *overrides])


# --- the lock --------------------------------------------------------------------------------------------------------


def test_two_runs_cannot_have_one_folder(folder: Path) -> None:
    owner = rf"another run \(host {socket.gethostname()}, pid {os.getpid()}\) is using run.dir run: wait"
    with Run(config("run.steps=7")):
        before = (folder / "run/config.yaml").read_text()
        with pytest.raises(RunInUse, match=owner):
            Run(config("run.steps=3"))
        assert (folder / "run/config.yaml").read_text() == before
        with Run(config("run.dir=other")):
            pass
    with pytest.raises(FileNotFoundError), Run(config()):
        raise FileNotFoundError
    with Run(config()):
        pass


def test_a_run_that_does_not_open_leaves_no_lock(folder: Path) -> None:
    (folder / "data/train.parquet").rename(folder / "train.parquet")
    with pytest.raises(ValueError, match=r"train.parquet: no such file"):
        Run(config())
    RunLock(folder / "run").release()


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from megappo.run_lock import RunLock; "
        "lock = RunLock(Path(sys.argv[1])); print('locked', flush=True); time.sleep(600)"
    )
    root = str(Path(__file__).resolve().parent.parent)
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": root}
    )
    with process:
        assert process.stdout is not None and process.stdout.readline() == b"locked\n"
        with pytest.raises(RunInUse, match=rf"pid {process.pid}\)"):
            RunLock(tmp_path)
        process.send_signal(signal.SIGKILL)
    RunLock(tmp_path).release()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Where nothing could keep a second run out: before it starts, and by the check, but not at a URL's place."""

    def flock(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    told = (
        rf"run.dir: run: its file system gives no file locks \({os.strerror(number)}\), .*: choose a folder on another"
    )
    with pytest.raises(RunFolderError, match=told):
        Run(config())
    assert not (folder / "run/config.yaml").exists()
    assert re.search(told, "\n".join(map(str, place_findings(config().run))))
    place = f"file://{folder}/there"
    (problem,) = place_findings(config(f"run.dir={place}", "run.work_dir=here").run)
    assert str(problem).startswith("run.work_dir: here: its file system gives no file locks")


# --- what it is opened with ------------------------------------------------------------------------------------------


def test_the_tokenizer_is_the_actors(folder: Path) -> None:
    (folder / "model").rename(folder / "own")
    with Run(config("roles.actor.model=own")) as run:
        assert len(run.train_prompts) == 20


def test_a_kill_does_not_damage_the_configuration(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Run(config("run.steps=7")):
        pass
    before = (folder / "run/config.yaml").read_bytes()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(SystemExit))
    with pytest.raises(SystemExit):
        Run(config("run.steps=8"))
    assert (folder / "run/config.yaml").read_bytes() == before


def test_changed_settings_are_listed() -> None:
    before = "run: {steps: 5, dir: a}\nroles: {actor: {tp: 2}, reference: {tp: 1}}\n"
    after = "run: {steps: 9, dir: a}\nroles: {actor: {tp: 1}}\n"
    assert changed_settings(before, after) == [
        "run.steps: 5 -> 9",
        "roles.actor.tp: 2 -> 1",
        "roles.reference.tp: 1 -> none",
    ]
    assert changed_settings(before, before) == []
    # As YAML 1.2 reads it, in which a configuration is written: no word but true and false is one of them.
    assert changed_settings("{sleep: drop, on: {a: 1}}", "{sleep: off, on: {a: 1e-6}}") == [
        "sleep: drop -> off",
        "on.a: 1 -> 1e-06",
    ]


def test_requests(folder: Path) -> None:
    with Run(config()) as run:
        prompts = run.train_prompts
    requests = make_requests(prompts, np.array([4, 2]), samples=3)
    assert requests.table.column("id").to_pylist() == [0, 1, 2, 3, 4, 5]
    assert requests.table.column("prompt_index").to_pylist() == [4, 4, 4, 2, 2, 2]
    assert requests.prompt_tokens.tolist() == [len(ids) for ids in requests.table.column("prompt_ids").to_pylist()]


# --- what it keeps of a batch ----------------------------------------------------------------------------------------


class Store:
    """Ray's object store, as far as the batch uses it."""

    def __init__(self) -> None:
        self.tables: list[pa.Table] = []

    def put(self, table: pa.Table) -> int:
        self.tables.append(table)
        return len(self.tables) - 1

    def get(self, refs: list[int], timeout: float | None = None) -> list[pa.Table]:
        return [self.tables[ref] for ref in refs]


def ragged(*rows: list[float]) -> pa.ListArray:
    return rows_of.ragged(np.concatenate(rows).astype(np.float32), [len(row) for row in rows])


def table() -> pa.Table:
    return pa.table(
        {
            "id": pa.array([0, 1], pa.int64()),
            "prompt_ids": pa.array([[1, 2, 3], [4, 5]], pa.list_(pa.int32())),
            "prompt_text": ["1+1=", "2="],
            "ground_truth": ["2", "2"],
            "data_source": ["a", "a"],
            "ability": ["sums", "sums"],
            "response_ids": pa.array([[5, 6], [8]], pa.list_(pa.int32())),
            "response": ["23", "4"],
            "finish_reason": ["length", "stop"],
            "score": pa.array([1.0, 0.0], pa.float32()),
            "failed": [False, True],
            "failure": ["", "returned nan"],
            "extras": ['{"acc": 1}', "{}"],
            **{name: ragged([-1.0, -2.0], [-4.0]) for name in ("logprobs", "rollout_logprobs", "ref_logprobs")},
            **{name: ragged([0.5, 1.0], [2.0]) for name in ("values", "rewards", "advantages", "returns")},
        }
    )


class Watched(Batch):
    """A batch that remembers which columns were asked for."""

    asked: list[set[str]] = []  # noqa: RUF012

    def read(self, *columns: str) -> pa.Table:
        self.asked.append(set(columns))
        return super().read(*columns)


@pytest.fixture
def batch(monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(dataflow, "ray", Store())
    monkeypatch.setattr(Watched, "asked", [])
    return Watched(np.array([0, 1]), np.array([4, 2]), np.array([2, 1]), ((put_table(table()),),))


def test_without_a_dump_only_what_metrics_and_samples_need_is_read(folder: Path, batch: Watched) -> None:
    with Run(config("run.dump_rollouts=false")) as run:
        metrics = run.keep(3, batch)
    (asked,) = batch.asked
    assert set(table().column_names) - asked == {"id", "ability", "ref_logprobs"}
    assert metrics == batch_metrics(table(), 8, 9)
    assert not (folder / "run/rollouts").exists()
    assert [sample["response"] for sample in read_samples("run")] == ["23", "4"]


def test_the_best_and_the_worst_response_are_among_those_logged() -> None:
    scores = [0.5] * 10 + [-1.0, 0.5, 2.0, 2.0]
    rows = picked(pa.table({"score": scores, "at": range(len(scores))}))
    assert rows["at"].to_pylist() == [*range(SAMPLES - 2), 10, 12]
    assert picked(pa.table({"score": [1.0, 1.0]})).num_rows == 2


def test_a_dump_is_whole_and_the_metrics_come_from_the_same_read(folder: Path, batch: Watched) -> None:
    with Run(config()) as run:
        metrics = run.keep(3, batch)
    assert len(batch.asked) == 1
    assert metrics == batch_metrics(table(), 8, 9)
    (file,) = (folder / "run/rollouts").iterdir()
    assert file.name == "step_3.parquet"
    assert pq.read_table(file).select(table().column_names).equals(table())


def test_training_goes_on_while_a_dump_is_written(
    folder: Path, batch: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, written = threading.Event(), []

    def write_table(rows: pa.Table, file: Any) -> None:
        assert may_write.wait(60)
        written.append(Path(file.name).name)
        pq.write_table(rows, file)

    monkeypatch.setattr(rollout_dump, "pq", SimpleNamespace(write_table=write_table))
    with Run(config()) as run:
        run.keep(1, batch)
        assert written == []
        # A checkpoint waits for it: it would be the last word about step 1.
        timer = threading.Timer(0.3, may_write.set)
        timer.start()
        with run.checkpoints.writing(1) as checkpoint:
            run.checkpoints.write_state(checkpoint, {"step": 1})
            assert written == []
        assert written == ["step_1.parquet.partial"]
        assert (folder / "run/checkpoints/step_1").is_dir()
        run.keep(2, batch)
        run.keep(3, batch)
    assert sorted(path.name for path in (folder / "run/rollouts").iterdir()) == [
        f"step_{step}.parquet" for step in (1, 2, 3)
    ]


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(rollout_dump.RolloutDump, "_write", fail)


def test_a_dump_that_fails_ends_the_run_at_its_next_step(folder: Path, batch: Watched, full_disk: None) -> None:
    with pytest.raises(OSError, match="no space left"), Run(config()) as run:
        run.keep(1, batch)
        run.keep(2, batch)
        raise AssertionError("it went on")


def test_a_dump_that_fails_keeps_a_checkpoint_from_its_name(folder: Path, batch: Watched, full_disk: None) -> None:
    with pytest.raises(OSError, match="no space left"), Run(config()) as run:
        run.keep(1, batch)
        with run.checkpoints.writing(1) as checkpoint:
            run.checkpoints.write_state(checkpoint, {"step": 1})
    assert [path.name for path in (folder / "run/checkpoints").iterdir()] == ["step_1.partial"]


def test_a_last_dump_that_fails_is_not_silent(
    folder: Path, batch: Watched, full_disk: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OSError, match="no space left"), Run(config()) as run:
        run.keep(1, batch)
    with pytest.raises(ZeroDivisionError), Run(config()) as run:  # the first failure is the one that is raised
        run.keep(1, batch)
        raise ZeroDivisionError
    assert "the last rollouts could not be written: no space left on device" in capsys.readouterr().out
