"""The end of a step, and of a run that a signal ends: what is validated, logged and kept, on a real run folder.

No process is started: the cluster writes no weights, and validation is a number that is given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
from small_run import log_steps, make_run_folder

from megappo import trainer as loop
from megappo.cluster.calls import WorkerLost
from megappo.config import load_config
from megappo.data.prompts import DataError
from megappo.oversight import StoppedByGuard
from megappo.report.run_log import read_log, read_samples
from megappo.report.step_metrics import Metrics
from megappo.restarts import with_restarts
from megappo.run import Run
from megappo.steps import NoProgress
from megappo.stop_request import StopRequest

METRIC = "val-core/arithmetic/acc/mean@1"
SCORES = {1: 0.25, 2: 0.75, 3: 0.5, 4: 0.625}
"""What validation gives after each step."""
START, VALIDATING = -1, -2
RUN = ("run.validate_every=2", "run.save_every=0", "run.steps=4", "run.validate_before=false", "run.trackers=[]")


class Driver(loop.Trainer):
    """The trainer without what workers do."""

    def __init__(self, run: Run, stop: StopRequest, dies: bool = False) -> None:
        cluster: Any = SimpleNamespace(
            device_name="cpu",
            trained={},
            gather=lambda *pending: [],
            everything_loaded=lambda step: nullcontext(),
            sync_weights=lambda version: 0,
        )
        super().__init__(run.config, run, cluster, stop)
        self.collector: Any = SimpleNamespace(save=lambda folder: None, load=lambda folder: None)
        self.dies = dies

    def train_step(self) -> bool:
        self.step += 1
        self.run._log.log_samples([{"step": self.step, "kind": "train", "response": "r"}])
        metrics = {"critic/score/mean": self.step / 8, "perf/throughput": float("nan")}
        return self.conclude({**metrics, "training/global_step": self.step})

    def validate(self, *, check: bool = False) -> Metrics:
        self.run._log.log_samples([{"step": self.step, "kind": "validation", "response": "v"}])
        if self.dies:
            raise KeyboardInterrupt
        return {METRIC: SCORES[self.step]}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run_folder(tmp_path_factory.mktemp("conclude"))


@pytest.fixture
def start(project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Begin or resume a run: ``start(name, stop after step, overrides)``; whether it went to its end.

    With ``loses`` a worker is lost in that step, after the signal; at ``START`` the signal comes before anything else,
    at ``VALIDATING`` in the first validation.
    """
    monkeypatch.chdir(project)

    def begin(name: str, until: int | None, *overrides: str, dies: bool = False, loses: bool = False) -> bool:
        config = load_config("config.yaml", [*RUN, f"run.dir={tmp_path / name}", "ppo.guards={}", *overrides])
        stop = StopRequest()
        if until == START:
            stop.ask()

        def driver(config: Any, run: Run, cluster: Any, stop: StopRequest) -> Driver:
            made = Driver(run, stop, dies)
            step = made.train_step

            def ask_and_step() -> bool:
                if made.step + 1 == until:
                    stop.ask()
                    if loses:
                        raise WorkerLost("a worker died")
                return step()

            validate = made.validate

            def ask_and_validate(*, check: bool = False) -> Metrics:
                if until == VALIDATING:
                    stop.ask()
                return validate(check=check)

            made.train_step = ask_and_step  # type: ignore[method-assign]
            made.validate = ask_and_validate  # type: ignore[method-assign]
            return made

        monkeypatch.setattr(loop, "Trainer", driver)
        monkeypatch.setattr(loop, "Cluster", lambda *args: nullcontext())
        with Run(config) as run:
            attempt = partial(loop._train_until_stopped, config, run, stop)
            return with_restarts(attempt, run, config.run.restarts)

    yield begin


def logged(folder: Path) -> list[tuple[int, list[tuple[str, str]]]]:
    """Steps and their metrics, but for times."""
    return [
        (row["step"], sorted((k, repr(v)) for k, v in row["metrics"].items() if not k.startswith("timing_s")))
        for row in read_log(folder)
    ]


def sampled(folder: Path) -> list[tuple[int, str]]:
    return sorted((row["step"], row["kind"]) for row in read_samples(folder))


def test_a_run_that_was_stopped_before_its_validation_has_it_when_it_goes_on(start: Any, tmp_path: Path) -> None:
    best = f"run.keep_best={{metric: {METRIC}}}"
    assert start("whole", None, best)
    assert not start("parts", 2, best)
    folder = tmp_path / "parts"
    # The checkpoint is there and holds the step's metrics; nothing says that it was validated.
    state = json.loads((folder / "checkpoints/step_2/trainer.json").read_text())
    assert state["unvalidated"]["critic/score/mean"] == 0.25 and state["best"] is None
    assert log_steps(folder) == [1] and sampled(folder) == [(1, "train"), (2, "train")]
    with pytest.raises(KeyboardInterrupt):  # killed while it validates: that comes again
        start("parts", None, best, dies=True)
    assert sampled(folder) == [(1, "train"), (2, "train"), (2, "validation")]
    assert not start("parts", 4, best)  # the last step too
    assert log_steps(folder) == [1, 2, 3] and (folder / "checkpoints/best").resolve().name == "step_2"
    assert "unvalidated" not in (folder / "checkpoints/step_2/trainer.json").read_text()
    assert start("parts", None, best) and start("parts", None, best)
    assert logged(folder) == logged(tmp_path / "whole")
    assert sampled(folder) == sampled(tmp_path / "whole")
    names = [sorted(path.name for path in (tmp_path / name / "checkpoints").iterdir()) for name in ("parts", "whole")]
    assert names == [["best", "step_2", "step_4"]] * 2


def test_a_run_that_is_to_stop_at_once_does_not_validate(start: Any, tmp_path: Path) -> None:
    with pytest.raises(NoProgress):
        start("begun", START, "run.validate_before=true")
    assert sampled(tmp_path / "begun") == []
    assert not start("begun", 2)
    with pytest.raises(NoProgress):
        start("begun", START)
    assert sampled(tmp_path / "begun") == [(1, "train"), (2, "train")]
    assert not start("begun", VALIDATING), "which was still to come: that is progress"
    assert log_steps(tmp_path / "begun") == [1, 2]
    with pytest.raises(NoProgress):
        start("begun", START)


def test_a_step_without_validation_is_concluded_at_once(start: Any, tmp_path: Path) -> None:
    assert not start("odd", 3)
    assert log_steps(tmp_path / "odd") == [1, 2, 3]
    assert "unvalidated" not in (tmp_path / "odd/checkpoints/step_3/trainer.json").read_text()
    assert not start("blind", 2, "data.validation=[]", "data.canary=[]")
    assert log_steps(tmp_path / "blind") == [1, 2]


def test_a_signal_and_a_loss_in_one_step_end_the_run_at_the_checkpoint_before(start: Any, tmp_path: Path) -> None:
    """What counts is what the command has done, not what it did since it last started over."""
    often = ("run.save_every=1", "run.restarts=1")
    assert not start("lost", 3, *often, loses=True)
    assert log_steps(tmp_path / "lost") == [1, 2]
    with pytest.raises(NoProgress):
        start("lost", 3, *often, loses=True)
    assert start("lost", None, *often)
    assert log_steps(tmp_path / "lost") == [1, 2, 3, 4]


def test_a_run_goes_on_with_the_prompts_that_it_began_with(start: Any, tmp_path: Path, project: Path) -> None:
    folder, train = tmp_path / "same", project / "data/train.parquet"
    assert not start("same", 2)
    stored, table = train.read_bytes(), pq.read_table(train)
    try:
        for other, rows in ((table.take([1, 0, *range(2, 20)]), 20), (table.slice(0, 19), 19)):
            pq.write_table(other, train)
            with pytest.raises(DataError, match=rf"data.train: its files hold {rows} rows, .* began with 20 rows, "):
                start("same", None)
        state = folder / "checkpoints/step_2/trainer.json"
        old = {name: value for name, value in json.loads(state.read_text()).items() if name != "data"}
        state.write_text(json.dumps(old))
        assert not start("same", 3), "a checkpoint of before, which has no fingerprint"
        with pytest.raises(DataError):
            train.write_bytes(stored)
            start("same", None)
    finally:
        train.write_bytes(stored)


def test_a_guard_that_ends_the_run_when_it_goes_on_ends_it_once(start: Any, tmp_path: Path) -> None:
    guard = f"ppo.guards={{good: {{metric: {METRIC}, above: 0.7, action: stop}}}}"
    assert not start("guarded", 2, guard)
    with pytest.raises(StoppedByGuard, match="stopped after step 2, whose checkpoint is written"):
        start("guarded", None, guard)
    assert start("guarded", None, guard)
    assert log_steps(tmp_path / "guarded") == [1, 2, 3, 4]
