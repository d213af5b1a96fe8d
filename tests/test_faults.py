"""What goes wrong while a run goes on is named at once, and nothing of the run outlives it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from installed import GPU, install
from small_run import MARK, Command, kill, log_steps, make_run_folder, marked, worker_pid

from megappo.cluster.calls import Calls, Span, WorkerFailed
from megappo.config import load_config
from megappo.report.run_log import read_log
from megappo.stop_request import STOPPED

SMALLER = [
    *("run.steps=2", "run.save_every=0", "run.validate_before=false", "data.validation=[]", "run.validate_every=0"),
    *("pools.train.devices_per_node=2", "roles.actor.pp=1", "pools.value.devices_per_node=1", "roles.critic.pp=1"),
    "ppo.mini_batch=21",
]


@dataclass
class Session:
    """A small cluster, driven from this process. The tests share it, and break it more and more."""

    folder: Path
    trainer: Any
    mark: str

    @property
    def cluster(self) -> Any:
        return self.trainer.cluster

    def pid(self, log: str) -> int:
        return worker_pid(marked(self.mark), self.folder / "run" / "logs" / log)

    def forget_calls(self) -> None:
        """Go on after a failure, which a run never does."""
        calls: Calls = self.cluster.calls
        calls._running.clear()
        calls._done.clear()


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    from megappo.cluster.cluster import Cluster
    from megappo.run import Run
    from megappo.trainer import Trainer

    folder = make_run_folder(tmp_path_factory.mktemp("faults"))
    mark = uuid.uuid4().hex
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv(MARK, mark)
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        config = load_config("config.yaml", SMALLER)
        with Run(config) as run, Cluster(config, run.data_sources, run.console.status) as cluster:
            trainer = Trainer(config, run, cluster)
            trainer.resume()
            yield Session(folder, trainer, mark)
        deadline = time.monotonic() + 10
        while left := marked(mark):
            assert time.monotonic() < deadline, f"still alive: {[process.cmdline() for process in left]}"
            time.sleep(0.1)


def overlap_s(spans: list[Span], *wanted: tuple[str, str]) -> float:
    """How long all of these (role, method) ran at the same time."""
    found = [[s for s in spans if (s.place.role, s.method) == pair] for pair in wanted]
    assert all(found)
    return min(max(s.ended for s in role) for role in found) - max(min(s.began for s in role) for role in found)


def test_roles_in_pools_of_their_own_run_at_the_same_time(session: Session) -> None:
    session.trainer.train_step()
    spans = session.cluster.calls.spans
    for pair in (("actor", "score"), ("critic", "score")), (("actor", "score"), ("reference", "score")):
        assert overlap_s(spans, *pair) > 0.01
    assert overlap_s(spans, ("critic", "score"), ("reference", "score"), ("actor", "score")) > 0.01
    assert overlap_s(spans, ("critic", "update"), ("actor", "update")) > 0.05


def test_one_mini_batch_starts_and_stays_at_ratio_one(session: Session) -> None:
    metrics = read_log(session.folder / "run")[-1]["metrics"]
    assert metrics["actor/ratio"] == pytest.approx(1, abs=1e-6)
    assert metrics["actor/ppo_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["actor/pg_clipfrac"] == 0


def test_a_worker_that_raises_is_named_with_its_traceback(session: Session, tmp_path: Path) -> None:
    cluster = session.cluster
    (tmp_path / "critic").mkdir()
    cluster.gather(cluster.critic.save(str(tmp_path / "critic")))
    for data in (tmp_path / "critic").glob("*.distcp"):
        data.write_bytes(data.read_bytes()[:1000])
    with pytest.raises(WorkerFailed) as failure:
        cluster.gather(cluster.critic.load(str(tmp_path / "critic")))
    text = str(failure.value)
    assert re.match(r"critic rank 0 \(pool value, node [\d.]+\) failed in load:\nTraceback", text), text
    assert "megatron_role.py" in text and "ray/" not in text  # its own frames, none of Ray's
    assert text.endswith("value-rank0.log")
    session.forget_calls()


def test_a_worker_that_does_not_answer_is_named(session: Session) -> None:
    cluster = session.cluster
    stopped = session.pid("train-rank1.log")
    batch = session.trainer.collector.collect(session.trainer.step, session.trainer.position)
    usual, cluster.calls.timeout_s = cluster.calls.timeout_s, 2.0
    os.kill(stopped, signal.SIGSTOP)
    began = time.monotonic()
    try:
        with pytest.raises(WorkerFailed) as failure:
            session.trainer.evaluate(batch)
    finally:
        os.kill(stopped, signal.SIGCONT)
        cluster.calls.timeout_s = usual
    assert time.monotonic() - began < 5
    assert "score: no answer within run.timeout_s = 2 s from" in str(failure.value)
    assert "actor rank 1 (pool train, node " in str(failure.value)
    session.forget_calls()
    session.trainer.evaluate(batch)  # it only slept


def test_an_engine_that_is_killed_is_named(session: Session) -> None:
    cluster, run = session.cluster, session.trainer.run
    from megappo.cluster.dataflow import put_table
    from megappo.data.requests import make_requests

    requests = make_requests(run.train_prompts, np.arange(20), 40)

    pending = cluster.rollout.generate(
        put_table(requests.table),
        requests.prompt_tokens,
        session.trainer.collector.sampling,
        samples=40,
        seed=(1,),
        version=session.trainer.step,
    )
    time.sleep(0.2)
    kill(session.pid("rollout-engine0.log"))
    began = time.monotonic()
    with pytest.raises(WorkerFailed, match=r"rollout rank 0 \(pool serve, node [\d.]+\) died in generate") as failure:
        cluster.gather(pending)
    assert time.monotonic() - began < 10
    assert str(failure.value).endswith("rollout-engine0.log")
    session.forget_calls()


# --- through the command line ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run_folder(tmp_path_factory.mktemp("bad"))


def test_a_reward_that_cannot_be_imported_ends_the_command(folder: Path) -> None:
    (folder / "broken.py").write_text("raise LookupError('no table of answers')\ndef compute_score(**_): return 0\n")
    command = Command(folder, *SMALLER, "roles.reward.function=broken.py:compute_score")
    assert command.wait(60) in (1, 2)
    command.assert_nothing_left()
    assert "error: " in command.text and "no table of answers" in command.text
    assert "starting" not in command.text  # it is known before any worker is


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing(folder: Path, number: signal.Signals) -> None:
    command = Command(folder, *SMALLER)
    command.until(lambda: "loading models" in command.text)
    os.kill(command.process.pid, number)
    assert command.wait(20) == 130
    assert "resumes" in command.text
    command.assert_nothing_left()
    assert "Traceback" not in command.text


def spoil_parquet(folder: Path) -> None:
    path = folder / "data" / "train.parquet"
    path.write_bytes(path.read_bytes()[:-100])


def spoil_tokenizer(folder: Path) -> None:
    for path in (folder / "model").glob("*token*"):
        path.unlink()


def spoil_weights(folder: Path) -> None:
    path = folder / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (spoil_parquet, "data/train.parquet"),
        (spoil_tokenizer, "tokenizer"),
        (spoil_weights, "model.safetensors"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(folder: Path, tmp_path: Path, spoil: Any, words: str) -> None:
    shutil.copytree(folder, tmp_path / "work")
    spoil(tmp_path / "work")
    command = Command(tmp_path / "work")
    assert command.wait(20) == 2
    errors = [line for line in command.text.splitlines() if not line.startswith("warning: ")]
    assert len(errors) == 1 and errors[0].startswith("error: ") and words in errors[0]
    with contextlib.suppress(psutil.Error):
        assert command.processes() == []


def test_gpus_that_are_not_there_are_missed_at_once(folder: Path, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    command = Command(folder, *SMALLER, "run.device=cuda", "run.dir=elsewhere")
    assert command.wait(20) == 1
    assert "error: vllm: not installed" in command.text and "set run.device=cpu" in command.text
    install(tmp_path, GPU)
    command = Command(folder, *SMALLER, "run.device=cuda", "run.dir=elsewhere", installed=tmp_path)
    assert command.wait(150) == 1
    assert "this machine has 0 GPUs" in command.text and "run.device=cpu" in command.text
    assert "Traceback" not in command.text
    command.assert_nothing_left()


def test_a_signal_before_a_time_limit_makes_a_checkpoint(folder: Path) -> None:
    command = Command(folder, *SMALLER, "run.dir=limited", "run.steps=200")
    command.until(lambda: log_steps(folder / "limited"))
    os.kill(command.process.pid, signal.SIGUSR1)
    assert command.wait(60) == STOPPED
    command.assert_nothing_left()
    last = log_steps(folder / "limited")[-1]
    assert last < 200
    assert f"stopped after step {last} as SIGUSR1 asked" in command.text
    assert (
        json.loads((folder / "limited" / "checkpoints" / f"step_{last}" / "trainer.json").read_text())["step"] == last
    )
