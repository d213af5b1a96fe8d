"""Generation that overlaps with training: the same steps as by hand, exact resumes, log-probabilities of each token.

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
from small_run import make_run_folder

from megappo.cluster.cluster import Cluster
from megappo.cluster.dataflow import put_table
from megappo.collect import Collected
from megappo.config import Config, load_config
from megappo.data import batch as rows_of
from megappo.data.order import PromptOrder
from megappo.data.requests import make_requests
from megappo.replay import Replayer
from megappo.report.run_log import read_log
from megappo.run import Run
from megappo.trainer import Trainer
from megappo.workers.settings import Sampling

pytestmark = pytest.mark.xdist_group("runs")

SMALLER = (
    *("run.steps=4", "run.save_every=2", "run.keep_checkpoints=9", "run.trackers=[]", "run.validate_every=0"),
    *("data.validation=[]", "data.canary=[]", "pools.train.devices_per_node=1", "roles.actor={pool: train}"),
    *("pools.value.devices_per_node=1", "roles.critic={pool: value}", "roles.reference={pool: value}"),
    *("roles.rollout.samples_per_prompt=2", "ppo.mini_batch=7", "ppo.guards={}", "ppo.actor_lr=3.0e-3"),
)
TIMES = ("timing_s/", "perf/", "staleness/")


@dataclass
class Shared:
    """A cluster, and what starts a run on it."""

    cluster: Cluster
    config: Config
    folder: Path

    @contextmanager
    def trainer(self, name: str, **ppo: Any) -> Iterator[Trainer]:
        """A trainer in a run folder of its own, from the first weights or from the folder's last checkpoint."""
        run, algorithm = replace(self.config.run, dir=name), replace(self.config.ppo, **ppo)
        config = replace(self.config, run=run, ppo=algorithm)
        with Run(config) as opened:
            if opened.last_checkpoint is None:
                self.cluster.gather(
                    *(group.load(f"{self.folder}/{role}") for role, group in self.cluster.trained.items())
                )
            trainer = Trainer(config, opened, self.cluster)
            trainer.resume()
            yield trainer

    def run(self, name: str, **ppo: Any) -> None:
        """A whole run."""
        with self.trainer(name, **ppo) as trainer:
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
        with Cluster(config, ["arithmetic"], lambda text: None) as cluster:
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
        super().__init__(trainer.config, PromptOrder(20, seed=3))
        self.trainer, self.held = trainer, {}

    def draw(self, step: int, version: int) -> Collected:
        requests = make_requests(self.trainer.run.train_prompts, self.order.take(7 * step, 7), 2)
        sampling = Sampling(1.0, 1.0, -1, 9)
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
    shared.run("one_ahead", staleness=1)
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
    with shared.trainer("overlapping", staleness=1) as trainer:
        trainer.train_step()
        trainer.train_step()
        spans = {(span.place.role, span.method): span for span in shared.cluster.calls.spans}
    assert spans["rollout", "generate"].began < spans["actor", "score"].ended
    assert spans["rollout", "generate"].ended < spans["actor", "send_weights"].began
    for metrics in (row["metrics"] for row in read_log(one_ahead)):
        assert metrics["perf/idle_share/serve"] == pytest.approx(1 - metrics["perf/busy_share/serve"])


def test_resumed_with_the_batch_that_was_ahead(shared: Shared, one_ahead: str) -> None:
    shutil.copytree(one_ahead, "resumed")
    shutil.rmtree("resumed/checkpoints/step_4")
    assert [path.name for path in Path("resumed/checkpoints/step_2/ahead").iterdir()] == ["2.parquet"]
    assert not Path(one_ahead, "checkpoints/step_4/ahead").exists()
    shared.run("resumed", staleness=1)
    assert_same("resumed", one_ahead)


def test_a_run_that_is_resumed_without_staleness_trains_on_what_was_ahead_first(shared: Shared, one_ahead: str) -> None:
    shutil.copytree(one_ahead, "stricter")
    shutil.rmtree("stricter/checkpoints/step_4")
    shared.run("stricter", correction=replace(shared.config.ppo.correction, level="token"))
    versions = [rows_of.column(rows, "weight_version").tolist() for _, rows in steps_of("stricter").values()]
    assert versions == [[0] * 14, [0] * 14, [1] * 14, [3] * 14]
    assert steps_of("stricter")[3][0] == steps_of(one_ahead)[3][0]
