"""A whole run on one GPU: every role takes turns, leaves the device and comes back; weights go through CUDA IPC."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from small_run import CONFIG, Command, make_run_folder, make_tiny_model
from test_reward_model import make_scorer
from test_without_critic import set_sections

from megappo.data import batch
from megappo.report.run_log import read_log

pytestmark = pytest.mark.gpu

POOLS = "pools: {all: {devices_per_node: 1}}\n"
ROLES = """\
roles:
  actor: {pool: all, micro_batch_tokens: 100, offload: OFFLOAD, recompute: selective}
  critic: {pool: all, micro_batch_tokens: 90, offload: OFFLOAD}
  reference: {pool: all, micro_batch_tokens: 80, offload: all}
  rollout: {pool: all, samples_per_prompt: 3, memory_fraction: 0.2, sleep: SLEEP}
  reward: {function: "score.py:compute_score", processes: 1}
"""


@pytest.mark.parametrize(("sleep", "offload"), [("drop", "all"), ("offload", "optimizer")])
def test_roles_take_turns_on_one_gpu(tmp_path: Path, sleep: str, offload: str) -> None:
    folder = make_run_folder(tmp_path / "work")
    text = re.sub(r"pools:\n(  .*\n)+", POOLS, CONFIG)
    text = re.sub(r"roles:\n(  .*\n)+", ROLES.replace("SLEEP", sleep).replace("OFFLOAD", offload), text)
    (folder / "config.yaml").write_text(text.replace("save_every: 2", "save_every: 0"))
    command = Command(folder, "run.device=cuda", "run.dtype=bfloat16", "run.steps=6", "ppo.correction.level=token")
    assert command.wait() == 0, command.text
    for step in range(1, 7):
        rows = pq.read_table(folder / "run" / "rollouts" / f"step_{step}.parquet")
        assert set(batch.column(rows, "weight_version")) == {step - 1}
        # The engine sampled from the actor's weights: in bfloat16 their log-probabilities differ by rounding only.
        gap = np.abs(batch.flat(rows, "rollout_logprobs") - batch.flat(rows, "logprobs"))
        assert gap.mean() < 0.05, step
    moved = np.abs(batch.flat(rows, "logprobs") - batch.flat(rows, "ref_logprobs"))
    assert moved.mean() > 0.05
    metrics = [line["metrics"] for line in read_log(folder / "run") if line["step"] > 0]
    for phase in ("gen", "sleep", "update_actor", "update_critic"):
        taken = [step[f"perf/device_memory_gb/{phase}"] for step in metrics[1:]]
        assert max(taken) - min(taken) < 0.2, (phase, taken)
    asleep, awake = (metrics[-1][f"perf/device_memory_gb/{phase}"] for phase in ("sleep", "gen"))
    assert awake - asleep > 20, "a fifth of an H200 was not given back"


JUDGED = """\
roles:
  actor: {pool: all, micro_batch_tokens: 100, offload: all}
  rollout: {pool: all, samples_per_prompt: 3, memory_fraction: 0.2}
  reward:
    {function: "score.py:compute_score", processes: 1, pool: all, model: scorer, micro_batch_tokens: 70, offload: all}
"""
GRPO = """\
ppo:
  {estimator: grpo, mini_batch: 8, actor_lr: 1.0e-3, kl: {in_reward: false}, dynamic_sampling: {max_rounds: 3}}
"""


def test_engines_sleep_whenever_a_reward_model_scores_on_their_gpu(tmp_path: Path) -> None:
    """Between rounds of dynamic sampling and in validation; afterwards they have the same weights again."""
    folder = make_run_folder(tmp_path / "work")
    make_scorer(folder / "scorer", vocab_size=51)
    make_tiny_model().make_tokenizer().save_pretrained(folder / "scorer")
    (folder / "config.yaml").write_text(set_sections(CONFIG, pools=POOLS, roles=JUDGED, ppo=GRPO))
    command = Command(folder, "run.device=cuda", "run.dtype=bfloat16", "run.steps=3", "run.validate_every=1")
    assert command.wait() == 0, command.text
    for step in (1, 2, 3):
        rows = pq.read_table(folder / "run" / "rollouts" / f"step_{step}.parquet")
        assert set(batch.column(rows, "weight_version")) == {step - 1}
        assert np.abs(batch.flat(rows, "rollout_logprobs") - batch.flat(rows, "logprobs")).mean() < 0.05, step
    log = read_log(folder / "run")
    assert [line["step"] for line in log if "val-core/arithmetic/reward/mean@1" in line["metrics"]] == [0, 1, 2, 3]
