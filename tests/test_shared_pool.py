"""A whole run in which all roles, two engines of tensor parallel 2 among them, take turns on one pool's devices."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_run import CONFIG, Command, make_run_folder, make_tiny_model
from test_reward_model import make_scorer, scores_of

from megappo.cluster.weights import WeightSync
from megappo.data import batch
from megappo.data.sequences import joined
from megappo.report.run_log import read_log
from megappo.reshard.actor_to_rollout import Receipt

pytestmark = pytest.mark.runs

POOLS = "pools: {all: {devices_per_node: 4}}\n"
ROLES = """\
roles:
  actor: {pool: all, tp: 2, pp: 2, sequence_parallel: true, micro_batch_tokens: 100, offload: all}
  critic: {pool: all, micro_batch_tokens: 90, offload: optimizer, recompute: full}
  reference: {pool: all, tp: 2, micro_batch_tokens: 80}
  rollout: {pool: all, tp: 2, samples_per_prompt: 3, kv_cache_gib: 0.1}
  reward:
    {function: "score.py:compute_score", processes: 1, pool: all, tp: 2, model: scorer, micro_batch_tokens: 70,
     offload: all, weights: {model: 0.5}, length_penalty: {per_token: 0.1, after: 2}, normalize: running, clip: 1.5}
"""


def test_all_roles_on_one_pool(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path / "work")
    make_scorer(folder / "scorer", vocab_size=51)
    make_tiny_model().make_tokenizer().save_pretrained(folder / "scorer")
    text = re.sub(r"pools:\n(  .*\n)+", POOLS, CONFIG)
    text = re.sub(r"roles:\n(  .*\n)+", ROLES, text).replace("save_every: 2", "save_every: 0")
    (folder / "config.yaml").write_text(text)
    command = Command(folder, "run.steps=2", "run.validate_before=false", "data.validation=[]", "run.validate_every=0")
    assert command.wait() == 0, command.text
    assert (folder / "run" / "logs" / "rollout-engine1.log").is_file()
    for step in (1, 2):
        rows = pq.read_table(folder / "run" / "rollouts" / f"step_{step}.parquet")
        assert rows.num_rows == 21
        assert set(batch.column(rows, "weight_version")) == {step - 1}
        # After the first update both engines sample from the new weights: their log-probabilities are the actor's.
        gap = np.abs(batch.flat(rows, "rollout_logprobs") - batch.flat(rows, "logprobs"))
        assert gap.mean() < 1e-3, step
        check_rewards(folder, rows)
    moved = np.abs(batch.flat(rows, "logprobs") - batch.flat(rows, "ref_logprobs"))
    assert moved.mean() > 1e-3  # there was an update to carry over
    metrics = [line["metrics"] for line in read_log(folder / "run")]
    assert {"reward/function/mean", "reward/model/mean", "reward/length_penalty/mean"} <= metrics[-1].keys()
    assert metrics[-1]["timing_s/reward_model"] > 0


def check_rewards(folder: Path, rows: pa.Table) -> None:
    """Scores are the function's, the model's as transformers has them, and the length penalty; no failed row counts."""
    failed = batch.column(rows, "failed")
    np.testing.assert_array_equal(failed, [truth.endswith("7") for truth in rows.column("ground_truth").to_pylist()])
    model = np.where(failed, 0, scores_of(folder / "scorer", joined(rows)))
    np.testing.assert_allclose(batch.column(rows, "score_model"), model, atol=1e-5)
    digits = [sum(map(str.isdigit, text)) / 9 for text in rows.column("response").to_pylist()]
    penalty = -0.1 * np.maximum(batch.lengths(rows, "response_ids") - 2, 0)
    score = np.where(failed, 0, np.array(digits) + 0.5 * model + penalty)
    np.testing.assert_allclose(batch.column(rows, "score"), score, atol=1e-5)


@dataclass
class Played:
    """Calls that are answered at once; what engines and actor were asked, in order."""

    asked: list[str] = field(default_factory=list)

    def gather(self, *pending: Any) -> list[Any]:
        return list(pending)

    def ask(self, method: str, arguments: Any, combine: Any = None) -> Any:
        self.asked.append(" ".join(map(str, [method, *arguments(0)])))
        return Receipt()

    def each(self, method: str, arguments: Any, combine: Any = None) -> int:
        self.asked.append(method)
        return 0  # bytes sent, as many as the receipt has


class Connected(WeightSync):
    """Without processes."""

    def _connect(self) -> None:
        self._on_device = False


@pytest.mark.parametrize("sleeping", [True, False])
def test_engines_give_way_to_a_reward_model_and_get_the_same_weights_again(sleeping: bool) -> None:
    played: Any = Played()
    config: Any = SimpleNamespace(roles=SimpleNamespace(actor=SimpleNamespace(offload="none")))
    weights = Connected(config, played, played, played, (), sleeping=sleeping)
    weights.sync(7)
    played.asked.clear()
    with weights.engines_resting(7):
        assert played.asked == (["sleep"] if sleeping else [])
    again = ["sleep", "wake weights", "receive_weights 7", "send_weights", "wake kv_cache"]
    assert played.asked == (again if sleeping else [])
