"""What goes wrong while a run goes on is named at once, and nothing of the run outlives it."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from small_run import LIMIT_S, MARK, kill, make_run_folder, marked, until, worker_pid

from megappo.checkpoints import DiskFull
from megappo.cluster.calls import Calls, WorkerFailed, WorkerLost
from megappo.cluster.dataflow import Batch, put_table
from megappo.cluster.weights import WeightSync
from megappo.config import load_config
from megappo.data.requests import make_requests
from megappo.report.run_log import read_log

pytestmark = pytest.mark.alone

SMALLER = [
    *("run.steps=2", "run.save_every=0", "run.validate_before=false", "data.validation=[]", "run.validate_every=0"),
    *("pools.train.devices_per_node=2", "roles.actor.pp=1", "pools.value.devices_per_node=1", "roles.critic.pp=1"),
    "ppo.mini_batch=21",
]


GONE_S = 10
"""Within it processes are gone that were told to end: they take a second or two."""


@dataclass
class Session:
    """A small cluster, driven from this process. The tests share it, and break it more and more."""

    folder: Path
    trainer: Any
    mark: str
    console: io.StringIO

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

    def ended(self) -> set[tuple[str, str]]:
        """(role, method) of the calls that have ended by now."""
        return {(span.place.role, span.method) for span in self.cluster.calls.spans}

    @contextlib.contextmanager
    def stopped(self, log: str) -> Iterator[None]:
        """One process stands still in here."""
        pid = self.pid(log)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def while_stopped(self, log: str, others: Set[tuple[str, str]], work: Callable[[], Any]) -> Any:
        """What comes of work during which a process stands still until others have ended their calls."""
        self.cluster.calls.spans.clear()
        with ThreadPoolExecutor(1) as thread:
            with self.stopped(log):
                working = thread.submit(work)
                until(lambda: others <= self.ended() or working.done(), self.ended)
                assert not working.done(), working.exception()
            return working.result(LIMIT_S)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    from megappo.cluster.cluster import Cluster
    from megappo.cluster.forks import Forks
    from megappo.run import Run
    from megappo.trainer import Trainer

    folder = make_run_folder(tmp_path_factory.mktemp("faults"))
    mark = uuid.uuid4().hex
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv(MARK, mark)
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        config = load_config("config.yaml", [*SMALLER, "run.steps=9", "run.restarts=1"])
        console = io.StringIO()
        with (
            Forks(config, engines=True) as forks,
            Run(config) as run,
            Cluster(config, run.data_sources, lambda text: print(text, file=console), forks) as cluster,
        ):
            trainer = Trainer(config, run, cluster)
            trainer.resume()
            yield Session(folder, trainer, mark, console)
        until(lambda: not marked(mark), lambda: f"alive: {[process.cmdline() for process in marked(mark)]}", GONE_S)


SCORES = {("actor", "score"): "train-rank1.log", ("critic", "score"): "value-rank0.log"}
SCORES["reference", "score"] = "score-rank0.log"
UPDATES = {("actor", "update"): "train-rank1.log", ("critic", "update"): "value-rank0.log"}


def test_roles_in_pools_of_their_own_run_at_the_same_time(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """While any one of them is at it, being stopped, the others come to their end."""
    trainer, update = session.trainer, session.trainer.update
    for call, log in UPDATES.items():
        held = functools.partial(session.while_stopped, log, UPDATES.keys() - {call})
        monkeypatch.setattr(trainer, "update", lambda batch, held=held: held(lambda: update(batch)))
        trainer.train_step()
    batch = trainer.collector.collect(trainer.step, trainer.position)
    for call, log in SCORES.items():
        session.while_stopped(log, SCORES.keys() - {call}, lambda: trainer.evaluate(batch))


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


def test_a_worker_that_does_not_answer_is_named(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = session.cluster
    batch = session.trainer.collector.collect(session.trainer.step, session.trainer.position)
    usual = cluster.calls.timeout_s, cluster.calls.heartbeat_s
    cluster.calls.heartbeat_s, began, warned = 0.5, time.monotonic(), ""
    # Its peer has sent its part, and stands in a collective of the forward pass.
    table = (
        r"\n  actor rank 1 \(.*\)  does not answer: stopped.*"
        r"\n  actor rank 0 \(.*\)  score actor for \d+ s; waits for others in \w+ \(megatron/.*$"
    )

    def is_told() -> bool:
        """Of those two alone: all others are done."""
        nonlocal warned
        warned += capsys.readouterr().err
        last = warned[warned.rfind("score: nothing has come") :].rstrip()
        return last.count("\n") == 2 and re.search(table, last) is not None

    try:
        with session.stopped("train-rank1.log"), ThreadPoolExecutor(1) as thread:
            scoring = thread.submit(session.trainer.evaluate, batch)
            until(is_told, lambda: warned)  # before the limit, which it would have kept
            assert not scoring.done()
            cluster.calls.timeout_s = 2.0
            failure = scoring.exception(5)
    finally:
        cluster.calls.timeout_s, cluster.calls.heartbeat_s = usual
    times = warned.count("score: nothing has come in the last 0.5 s; run.timeout_s is 300 s\n")
    assert 1 <= times <= (time.monotonic() - began) / 0.5, warned
    text = str(failure)
    assert isinstance(failure, WorkerLost)
    headline = (
        r"score: no answer within run.timeout_s = 2 s from actor rank 1 \(pool train, node [\d.]+\); see \S*train-"
    )
    assert re.match(headline, text), text
    assert re.search(table, text), text
    session.forget_calls()
    session.trainer.evaluate(batch)  # it only slept


def test_a_reward_process_that_never_returns_is_named(session: Session) -> None:
    cluster = session.cluster
    batch = session.trainer.collector.collect(session.trainer.step, session.trainer.position)
    usual, cluster.calls.heartbeat_s = (cluster.calls.timeout_s, cluster.calls.heartbeat_s), 0.5
    cluster.calls.spans.clear()
    try:
        with session.stopped("reward.log"), ThreadPoolExecutor(1) as thread:
            scoring = thread.submit(session.trainer.evaluate, batch)
            until(lambda: SCORES.keys() <= session.ended(), session.ended)  # all others
            assert not scoring.done()
            cluster.calls.timeout_s = 2.0
            failure = scoring.exception(5)
    finally:
        cluster.calls.timeout_s, cluster.calls.heartbeat_s = usual
    assert isinstance(failure, WorkerLost)
    assert re.match(r"run_functions: no answer within .* s from reward rank 0 \(", str(failure)), failure
    assert re.search(r"\n  reward rank 0 \(pool driver, .*\)  does not answer", str(failure))
    session.forget_calls()
    session.trainer.evaluate(batch)


def test_an_actor_that_stalls_in_a_sync_is_named_and_half_a_sync_is_never_used(session: Session) -> None:
    cluster, version = session.cluster, session.trainer.step

    def connected(timeout_s: float) -> WeightSync:
        config = replace(cluster.config, run=replace(cluster.config.run, timeout_s=timeout_s))
        return WeightSync(config, cluster.calls, cluster.actor, cluster.rollout, (), sleeping=False)

    weights = connected(5.0)
    with session.stopped("train-rank1.log"):
        began = time.monotonic()
        with pytest.raises(WorkerFailed, match=r"rollout rank \d .* failed in receive_weights") as failure:
            weights.sync(version)
        assert time.monotonic() - began < 10
        assert re.search(r"TransferError: actor rank 1 \(node [\w.]+\) sent nothing within 4.5 s", str(failure.value))
        session.forget_calls()
        with pytest.raises(WorkerFailed, match="the last weight sync did not complete"):
            generate(session, prompts=1, samples=2)
    session.forget_calls()
    assert connected(cluster.config.run.timeout_s).sync(version) > 0
    assert len(generate(session, prompts=1, samples=2).read("response_ids")) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_is_named_and_leaves_the_checkpoint_before(session: Session) -> None:
    trainer, checkpoints = session.trainer, session.trainer.run.checkpoints
    trainer.save({})
    needed = sum(path.stat().st_size for path in checkpoints.latest().rglob("*"))
    with small_disk(checkpoints.folder, needed * 3 // 2):
        trainer.save({})
        trainer.step += 1
        with pytest.raises(DiskFull, match=r"the disk is full \(or a quota of it\)") as failure:
            trainer.save({})
        assert f"{checkpoints.folder}: " in str(failure.value)
        session.forget_calls()
        trainer.resume()
        assert [path.name for path in checkpoints.folder.iterdir()] == [f"step_{trainer.step}"]
    trainer.train_step()


@contextlib.contextmanager
def small_disk(folder: Path, of_bytes: int) -> Iterator[None]:
    """A file system of its own, mounted on a folder, whose content is hidden meanwhile."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={of_bytes}", "none", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def generate(session: Session, prompts: int, samples: int) -> Batch:
    requests = make_requests(session.trainer.run.train_prompts, np.arange(prompts), samples)
    sampling, version = session.trainer.collector._collector.sampling, session.trainer.step
    options: dict[str, Any] = {"samples": samples, "seed": (1,), "version": version}
    return session.cluster.generate(put_table(requests.table), requests.prompt_tokens, sampling, **options)


@dataclass
class Killing:
    """Long requests to the engines, during which one is killed."""

    session: Session

    def generate(self) -> Batch:
        return generate(self.session, prompts=20, samples=40)

    def kill_soon(self) -> None:
        """As soon as it says that it is at them."""
        pid, (engine,) = self.session.pid("rollout-engine0.log"), self.session.cluster.rollout.members
        watch = engine.place.watch

        def wait_and_kill() -> None:
            until(lambda: (watch.ask() or {}).get("what") == "generate")
            kill(pid)

        threading.Thread(target=wait_and_kill, daemon=True).start()


@pytest.mark.parametrize("log", ["train-rank0.log", "reward.log", "rollout-engine0.log"])
def test_processes_are_forked(session: Session, log: str) -> None:
    parent = psutil.Process(session.pid(log)).parent()
    assert parent is not None and "megappo.cluster.forks" in parent.cmdline()


def test_an_engine_that_is_killed_is_replaced_and_its_prompts_come_again(session: Session) -> None:
    killing, cluster = Killing(session), session.cluster
    drawn = killing.generate()
    before = session.pid("rollout-engine0.log")
    killing.kill_soon()
    replaced = killing.generate().read("response_ids", "rollout_logprobs", "weight_version")
    assert session.pid("rollout-engine0.log") != before
    # What it had drawn before is still there, for the driver and for workers.
    undisturbed = drawn.read("response_ids", "rollout_logprobs", "weight_version")
    cluster.gather(cluster.critic.score("values", drawn.take(drawn.ids[:3])))
    assert replaced.equals(undisturbed)  # the same weights, which are not those on the disk, and the same seed
    shown = session.console.getvalue()
    assert re.search(r"lost: rollout rank 0 \(pool serve, node [\d.]+\) died in generate", shown), shown
    assert shown.index("starting in its place: engine 0") < shown.index(
        "back in service after this weight sync: engine 0"
    )
    assert cluster.sync_weights(session.trainer.step) > 0  # with the new one


def test_an_engine_that_is_killed_once_more_ends_the_run_with_its_name(session: Session) -> None:
    session.cluster._serving._limit = 0
    Killing(session).kill_soon()
    began = time.monotonic()
    with pytest.raises(WorkerLost, match=r"rollout rank 0 \(pool serve, node [\d.]+\) died in generate") as failure:
        Killing(session).generate()
    assert time.monotonic() - began < 10
    assert str(failure.value).endswith("rollout-engine0.log")
    session.forget_calls()
