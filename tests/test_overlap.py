"""Generation that overlaps with training: the same steps as by hand, exact resumes, log-probabilities of each token.
Then steps of other algorithms.

One cluster serves all; each test drives it by a loop of its own, from the first weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from small_run import assert_logs_what_check_says, make_run_folder

from megappo.cluster.cluster import Cluster
from megappo.cluster.dataflow import batch_of, put_table
from megappo.cluster.forks import Forks
from megappo.collect import Collected
from megappo.config import Config, load_config
from megappo.data import batch as rows_of
from megappo.data.requests import make_requests
from megappo.replay import Replayer
from megappo.report.run_log import read_log
from megappo.run import Run
from megappo.trainer import Trainer
from megappo.workers.settings import Sampling

pytestmark = pytest.mark.runs

SMALLER = (
    *("run.steps=4", "run.keep_checkpoints=9", "run.trackers=[]", "run.validate_every=0"),
    *("data.validation=[]", "data.canary=[]", "pools.train.devices_per_node=1", "roles.actor={pool: train}"),
    *("pools.value.devices_per_node=1", "roles.critic={pool: value}", "roles.reference={pool: value}"),
    *("roles.rollout.samples_per_prompt=2", "ppo.mini_batch=7", "ppo.guards={}", "ppo.actor_lr=3.0e-3"),
    *("data.max_response=40", "roles.rollout.max_sequences=4", "ppo.staleness=2", "run.save_every=1"),
)
TIMES = ("timing_s/", "perf/", "staleness/")


@dataclass
class Shared:
    """A cluster, and what starts a run on it."""

    cluster: Cluster
    config: Config
    folder: Path

    @contextmanager
    def trainer(self, name: str, staleness: int = 0, replay: tuple[str, ...] = (), **ppo: Any) -> Iterator[Trainer]:
        """A trainer in a run folder of its own, from the first weights or from the folder's last checkpoint."""
        run, algorithm = replace(self.config.run, dir=name), replace(self.config.ppo, staleness=staleness, **ppo)
        data = replace(self.config.data, replay=replay)
        config = replace(self.config, run=run, data=data, ppo=algorithm)
        with Run(config) as opened:
            if opened.last_checkpoint is None:
                self.cluster.gather(
                    *(group.load(f"{self.folder}/{role}") for role, group in self.cluster.trained.items())
                )
            trainer = Trainer(config, opened, self.cluster)
            trainer.resume()
            yield trainer

    def run(self, name: str, staleness: int, **ppo: Any) -> None:
        """A whole run."""
        with self.trainer(name, staleness, **ppo) as trainer:
            while trainer.step < trainer.config.run.steps:
                trainer.train_step()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    folder = make_run_folder(tmp_path_factory.mktemp("overlap"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        path = folder / "config.yaml"
        path.write_text(path.read_text().replace("  score: {devices_per_node: 1}\n", ""))
        config = load_config(path, SMALLER)
        with (
            Forks(config, engines=True) as forks,
            Cluster(config, ["arithmetic"], lambda text: None, forks) as cluster,
        ):
            for role in cluster.trained:
                (folder / role).mkdir()
            cluster.gather(*(group.save(f"{folder}/{role}") for role, group in cluster.trained.items()))
            yield Shared(cluster, config, folder)


def steps_of(name: str) -> dict[int, tuple[dict[str, float], Any]]:
    """(metrics that are no times, batch) of each step of a run."""
    out = {}
    for row in read_log(name):
        plain = {key: value for key, value in row["metrics"].items() if not key.startswith(TIMES)}
        out[row["step"]] = plain, pq.read_table(f"{name}/rollouts/step_{row['step']}.parquet")
    return out


def assert_same(name: str, other: str) -> None:
    found, expected = steps_of(name), steps_of(other)
    assert found.keys() == expected.keys() == {1, 2, 3, 4}
    for step in found:
        assert found[step][0] == expected[step][0], step
        assert found[step][1].equals(expected[step][1]), step


class ByHand(Replayer):
    """A strict loop that draws the next step's batch before it trains: from weights that will be old by then."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer.config, prompts=20)
        self.trainer, self.held = trainer, {}

    def draw(self, step: int, version: int) -> Collected:
        requests = make_requests(self.trainer.run.train_prompts, self.order.take(7 * step, 7), 2)
        sampling = Sampling(1.0, 1.0, -1, 40)
        options = {"samples": 2, "seed": (3, step), "version": version}
        batch = self.trainer.cluster.generate(put_table(requests.table), requests.prompt_tokens, sampling, **options)
        return Collected(batch, 7 * step + 7)

    def collect(self, step: int, position: int) -> Collected:
        own = self.held.pop(step, None) or self.draw(step, 0)
        if step < 3:
            self.held[step + 1] = self.draw(step + 1, step)
        return own


@pytest.fixture(scope="module")
def one_ahead(shared: Shared) -> str:
    shared.run("one_ahead", 1)
    return "one_ahead"


def test_one_ahead_is_a_strict_loop_with_weights_of_the_step_before(shared: Shared, one_ahead: str) -> None:
    correction = replace(shared.config.ppo.correction, level="token")
    with shared.trainer("by_hand", correction=correction) as trainer:
        trainer.collector = ByHand(trainer)
        while trainer.step < 4:
            trainer.train_step()
    assert_same(one_ahead, "by_hand")
    versions = [rows_of.column(rows, "weight_version").tolist() for _, rows in steps_of(one_ahead).values()]
    assert versions == [[0] * 14, [0] * 14, [1] * 14, [2] * 14]
    logged = [row["metrics"] for row in read_log(one_ahead)]
    assert [(m["staleness/mean"], m["staleness/max"]) for m in logged] == [(0, 0), (1, 1), (1, 1), (1, 1)]


def test_old_responses_are_weighed_by_what_their_own_weights_thought_of_them(one_ahead: str) -> None:
    """The decoupled objective: weights pi / mu before the update, mu the engine's, and ratios that start at 1."""
    for step, (metrics, rows) in steps_of(one_ahead).items():
        ratio = np.exp(rows_of.flat(rows, "logprobs") - rows_of.flat(rows, "rollout_logprobs"))
        np.testing.assert_allclose(rows_of.flat(rows, "correction"), np.minimum(ratio, 2.0), rtol=1e-5)
        assert (np.abs(ratio - 1).max() > 0.05) == (step > 1)
        assert abs(metrics["actor/ppo_kl_first"]) < 1e-6


def test_engines_generate_while_others_work(shared: Shared, one_ahead: str) -> None:
    with shared.trainer("overlapping", 1) as trainer:
        trainer.train_step()
        trainer.train_step()
        spans = {(span.place.role, span.method): span for span in shared.cluster.calls.spans}
    # The responses of the next step: begun while this one was trained on, and not drawn before nor after.
    assert spans["actor", "score"].began < spans["rollout", "generate"].ended
    assert spans["rollout", "generate"].began < spans["actor", "update"].ended
    assert spans["rollout", "generate"].ended < spans["actor", "send_weights"].began
    assert_logs_what_check_says(one_ahead)
    for metrics in (row["metrics"] for row in read_log(one_ahead)):
        assert metrics["perf/idle_share/serve"] == pytest.approx(1 - metrics["perf/busy_share/serve"])


def resume_at(name: str, step: int, copy: str) -> None:
    """A copy of a run as if it had been killed after a step's checkpoint."""
    shutil.copytree(name, copy)
    for later in range(step + 1, 5):
        shutil.rmtree(f"{copy}/checkpoints/step_{later}")


def test_resumed_with_the_batch_that_was_ahead(shared: Shared, one_ahead: str) -> None:
    resume_at(one_ahead, 2, "resumed")
    assert [path.name for path in Path("resumed/checkpoints/step_2/ahead").iterdir()] == ["2.parquet"]
    assert not Path(one_ahead, "checkpoints/step_4/ahead").exists()
    shared.run("resumed", 1)
    assert_same("resumed", one_ahead)


def test_a_run_that_is_resumed_without_staleness_trains_on_what_was_ahead_first(shared: Shared, one_ahead: str) -> None:
    resume_at(one_ahead, 2, "stricter")
    shared.run("stricter", 0, correction=replace(shared.config.ppo.correction, level="token"))
    versions = [rows_of.column(rows, "weight_version").tolist() for _, rows in steps_of("stricter").values()]
    assert versions == [[0] * 14, [0] * 14, [1] * 14, [3] * 14]
    assert steps_of("stricter")[3][0] == steps_of(one_ahead)[3][0]


# --- several batches ahead -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def streamed(shared: Shared) -> str:
    """Interrupted as soon as each batch is there: how far the next ones are must not depend on who trains how fast."""
    with shared.trainer("streamed", 2) as trainer:
        collector, collect = trainer.collector, trainer.collector.collect

        def interrupted(step: int, position: int) -> Collected:
            collected = collect(step, position)
            collector.settle()
            return collected

        collector.collect = interrupted  # type: ignore[method-assign]
        while trainer.step < 4:
            trainer.train_step()
    return "streamed"


def test_responses_go_on_across_weight_syncs(streamed: str) -> None:
    assert_logs_what_check_says(streamed)
    partial = 0
    for step, (_, rows) in steps_of(streamed).items():
        versions = rows_of.split_rows(rows, "token_versions")
        first, last = rows_of.column(rows, "weight_version"), rows_of.column(rows, "last_weight_version")
        for ids, own, reason in zip(
            rows_of.split_rows(rows, "response_ids"), versions, rows.column("finish_reason").to_pylist(), strict=True
        ):
            assert len(ids) == len(own) <= 40
            assert (np.diff(own) >= 0).all()
            assert 1 not in ids[:-1] and (ids[-1] == 1) == (reason == "stop") and (len(ids) == 40 or reason == "stop")
        assert [own[0] for own in versions] == first.tolist() and [own[-1] for own in versions] == last.tolist()
        assert first.min() >= max(step - 1 - 2, 0) and last.max() <= step - 1
        metrics = read_log(streamed)[step - 1]["metrics"]
        assert metrics["staleness/partial_share"] == pytest.approx((first != last).mean())
        assert metrics["staleness/max"] == step - 1 - first.min()
        partial += (first != last).sum()
    assert partial > 0


def test_each_token_has_the_log_probability_of_the_weights_that_drew_it(shared: Shared, streamed: str) -> None:
    """Scored by Megatron from the checkpoint of each version."""
    cluster = shared.cluster
    found = {}
    for version in range(4):
        folder = f"{streamed}/checkpoints/step_{version}" if version else str(shared.folder)
        cluster.gather(cluster.actor.load(str(Path(folder, "actor").absolute())))
        for step, (_, rows) in steps_of(streamed).items():
            scored = batch_of(rows.select(["id", "prompt_ids", "response_ids"]), 60.0)
            (tables,) = cluster.gather(cluster.actor.score("logprobs", scored, column="cold", temperature=1.0))
            found[version, step] = rows_of.flat(scored.with_columns(tables).read("cold"), "cold")
    right, wrong = [], []
    for step, (_, rows) in steps_of(streamed).items():
        drawn, versions = rows_of.flat(rows, "rollout_logprobs"), rows_of.flat(rows, "token_versions")
        for version in range(4):
            gap = np.abs(found[version, step] - drawn)
            right.append(gap[versions == version])
            wrong.append(gap[versions != version])
    assert np.concatenate(right).max() < 1e-4
    assert np.median(np.concatenate(wrong)) > 1e-2


def test_resumed_with_responses_as_far_as_they_were(shared: Shared, streamed: str) -> None:
    resume_at(streamed, 2, "resumed_stream")
    held = {step: pq.read_table(f"resumed_stream/checkpoints/step_2/ahead/{step}.parquet") for step in (2, 3)}
    assert any(rows.column("finish_reason").null_count for rows in held.values())
    shared.run("resumed_stream", 2)
    for step, before in held.items():
        rows = steps_of("resumed_stream")[step + 1][1]
        for name in ("response_ids", "rollout_logprobs", "token_versions"):
            for start, whole in zip(rows_of.split_rows(before, name), rows_of.split_rows(rows, name), strict=True):
                np.testing.assert_array_equal(whole[: len(start)], start)
    assert [row["step"] for row in read_log("resumed_stream")] == [1, 2, 3, 4]


def test_what_was_not_done_is_drawn_anew_without_staleness(shared: Shared, streamed: str) -> None:
    resume_at(streamed, 2, "anew")
    shared.run("anew", 0)
    versions = [rows_of.column(rows, "weight_version").tolist() for _, rows in steps_of("anew").values()]
    assert versions[3] == [3] * 14


# --- other algorithms ------------------------------------------------------------------------------------------------


def test_remax_takes_off_what_a_greedy_response_scores(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared.cluster, "critic", None)
    with shared.trainer("remax", estimator="remax", critic_lr=None) as trainer:
        requests = make_requests(trainer.run.train_prompts, trainer.collector.order.take(0, 7), 1)
        greedy = shared.cluster.generate(
            put_table(requests.table),
            requests.prompt_tokens,
            Sampling(0.0, 1.0, -1, 40),
            samples=1,
            seed=(9,),
            version=0,
        )
        scored = greedy.with_columns(*shared.cluster.gather(shared.cluster.reward.score(greedy))).read("score")
        trainer.train_step()
        trainer.train_step()
    (metrics, rows), second = steps_of("remax")[1], steps_of("remax")[2][1]
    np.testing.assert_array_equal(rows_of.column(rows, "baseline"), np.repeat(rows_of.column(scored, "score"), 2))
    assert metrics["reward/baseline/mean"] == pytest.approx(rows_of.column(scored, "score").mean())
    assert "values" not in rows.column_names and not [name for name in metrics if name.startswith("critic/v")]
    for batch in (rows, second):
        baselines = rows_of.column(batch, "baseline")
        given = zip(*(rows_of.split_rows(batch, name) for name in ("advantages", "rewards")), baselines, strict=True)
        for advantages, rewards, baseline in given:
            np.testing.assert_allclose(advantages, rewards[::-1].cumsum()[::-1] - baseline, atol=1e-5)
    assert len(set(rows_of.column(second, "baseline"))) > 1


def test_cispo_on_responses_with_a_tool_s_tokens_and_three_passes_of_the_critic(shared: Shared, one_ahead: str) -> None:
    """A dumped batch with a mask. With a single update all ratios are 1: the loss is -mean(A log pi) of own tokens."""
    rows = steps_of(one_ahead)[1][1]
    lengths, random = rows_of.lengths(rows, "response_ids"), np.random.default_rng(0)
    mask = random.integers(0, 2, lengths.sum())
    ends = np.cumsum(lengths)
    mask[ends - lengths] = 1  # each row has an own token
    mask[ends - 1] = lengths == 1  # and ends with the tool's
    pq.write_table(rows.append_column("loss_mask", rows_of.ragged(mask, lengths)), "masked.parquet")
    logged = {}
    for passes in (1, 3):
        cispo: dict[str, Any] = {"loss": "cispo", "clip": 1.0, "clip_high": 2.0, "mini_batch": 14, "entropy_coef": 0.0}
        with shared.trainer(f"masked{passes}", 0, ("masked.parquet",), critic_updates=passes, **cispo) as trainer:
            trainer.train_step()
        logged[passes], out = steps_of(f"masked{passes}")[1]
    own = mask.astype(bool)
    advantages, logprobs = rows_of.flat(out, "advantages"), rows_of.flat(out, "logprobs")
    assert not advantages[~own].any() and not rows_of.flat(out, "rewards")[~own].any()
    last = [start + np.flatnonzero(own[start:end])[-1] for start, end in zip(ends - lengths, ends, strict=True)]
    np.testing.assert_allclose(rows_of.flat(out, "rewards")[last], rows_of.column(out, "score"), atol=1e-6)
    assert_logs_what_check_says("masked3", but=["timing_s/reward"])
    for metrics in logged.values():
        assert metrics["response_length/produced_ratio"] == pytest.approx(own.mean())
        assert metrics["actor/pg_loss"] == pytest.approx(-(advantages * logprobs)[own].mean(), rel=1e-4)
    error = (rows_of.flat(out, "returns") - rows_of.flat(out, "values"))[own]
    assert logged[1]["critic/vf_loss"] == pytest.approx((error**2).mean() / 2, rel=1e-4)
    assert logged[3]["critic/vf_loss"] < 0.99 * logged[1]["critic/vf_loss"]  # the mean of three, the first as high
