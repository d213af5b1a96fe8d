"""A whole run of low-rank adapters in which responses to a prompt are compared: no critic.

It is kept at a URL, and resumes on a machine that has nothing else of it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from small_run import CONFIG, Command, assert_logs_what_check_says, make_run_folder

from megappo.data import batch
from megappo.report.run_log import read_log

pytestmark = pytest.mark.runs

POOLS = "pools: {train: {devices_per_node: 1}, serve: {devices_per_node: 1}}\n"
ROLES = """\
roles:
  actor: {pool: train, micro_batch_tokens: 100, lora: {rank: 4, alpha: 8, targets: [q_proj, v_proj, down_proj]}}
  rollout: {pool: serve, samples_per_prompt: 3, kv_cache_gib: 0.1}
  reward: {function: "score.py:compute_score", processes: 1}
"""
PPO = "ppo: {estimator: grpo, mini_batch: 8, actor_lr: 1.0e-3, kl: {in_reward: false, loss_coef: 0.01}}\n"


def set_sections(text: str, **sections: str) -> str:
    """A configuration with other sections in place of its own."""
    for name, section in sections.items():
        text = re.sub(rf"{name}:\n(  .*\n)+", section, text)
    return text


def test_group_relative_run(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path / "work")
    (folder / "config.yaml").write_text(set_sections(CONFIG, pools=POOLS, roles=ROLES, ppo=PPO))
    kept = folder / "kept"
    remote = (f"run.dir=file://{kept}", "run.work_dir=run")
    for steps in (2, 3):
        command = Command(folder, *remote, f"run.steps={steps}", "run.validate_every=0")
        assert command.wait() == 0, command.text
        assert "not up at" not in command.text and "failed (" not in command.text
        if steps == 2:
            (folder / "run").rename(folder / "lost")
    assert f"the checkpoint of step 2 (0.0 GB) comes down from file://{kept}" in command.text
    assert [row["step"] for row in read_log(kept)] == [0, 1, 2, 3]
    assert "resumed from the checkpoint of step 2" in command.text
    assert "run.steps: 2 -> 3" in command.text
    rows = pq.read_table(folder / "run" / "rollouts" / "step_3.parquet")
    assert not {"values", "returns"} & set(rows.column_names)
    gaps = [batch.flat(rows, "logprobs") - batch.flat(rows, "ref_logprobs")]
    first_step = pq.read_table(kept / "rollouts" / "step_1.parquet")
    gaps.append(batch.flat(first_step, "logprobs") - batch.flat(first_step, "ref_logprobs"))
    assert np.abs(gaps[0]).max() > 1e-3 and not gaps[1].any()  # of the actor from itself without its adapters
    first = np.array([row[0] for row in batch.split_rows(rows, "advantages")])
    scores, groups = batch.column(rows, "score"), batch.column(rows, "prompt_index")
    assert len(set(groups)) == 6  # of seven prompts: an epoch ends, and one comes twice, with six responses to compare
    for group in set(groups):
        own = scores[groups == group]
        np.testing.assert_allclose(first[groups == group], (own - own.mean()) / (own.std(ddof=1) + 1e-6), atol=1e-4)
    metrics = read_log(folder / "run")[-1]["metrics"]
    assert "actor/pg_loss" in metrics
    assert metrics["training/rollout_probs_diff_max"] < 1e-4  # the engine has merged what the actor has trained
    assert not [name for name in metrics if name.startswith(("critic/v", "timing_s/val"))]
    for checkpoint in (folder / "run" / "checkpoints" / "step_3", kept / "checkpoints" / "step_3"):
        assert sorted(path.name for path in checkpoint.iterdir() if path.is_dir()) == ["actor"]
    assert_logs_what_check_says(folder / "run")
    replays(folder)
    dapo_goes_on(folder)


def dapo_goes_on(folder: Path) -> None:
    """Prompts whose answers end in 7 fail and score 0 three times over; dynamic sampling takes others instead.

    A guard ends the run after two steps, and of three checkpoints, the last and the best stay.
    """
    core = "val-core/arithmetic/reward/mean@1"
    command = Command(
        folder,
        *("run.steps=9", "run.validate_every=1", "run.keep_checkpoints=1", f"run.keep_best.metric={core}"),
        *("ppo.dynamic_sampling.max_rounds=9", "ppo.overlong.buffer=4", "ppo.loss=gspo", "ppo.mask_truncated=true"),
        "ppo.guards={long: {metric: response_length/mean, above: 0, for_steps: 2, action: stop}}",
    )
    assert command.wait() == 1, command.text
    assert "error: ppo.guards.long: response_length/mean is " in command.text
    assert "stopped after step 5, whose checkpoint is written" in command.text
    position = 3 * 7
    for step in (4, 5):
        rows = pq.read_table(folder / "run" / "rollouts" / f"step_{step}.parquet")
        scores = batch.column(rows, "score").reshape(7, 3)
        assert (scores.min(axis=1) < scores.max(axis=1)).all()
        assert not any(rows.column("failed").to_pylist())
        over = np.clip(batch.lengths(rows, "response_ids") - 5, 0, 4) / 4  # of 9 tokens, the last 4
        rewards = [row.sum() for row in batch.split_rows(rows, "rewards")]
        np.testing.assert_allclose(rewards, scores.reshape(-1) - over, atol=1e-6)
        cut = np.array([reason == "length" for reason in rows.column("finish_reason").to_pylist()])
        moved = np.array([row.any() for row in batch.split_rows(rows, "advantages")])
        assert cut.any() and not moved[cut].any() and moved.any()
        metrics = read_log(folder / "run")[step]["metrics"]
        assert metrics["reward/overlong_penalty/mean"] == pytest.approx(-over.mean())
        position += int(metrics["train/sampled_prompts"])
        assert metrics["train/informative_prompts"] >= 7 and metrics["train/num_gen_batches"] <= 9
    assert_logs_what_check_says(folder / "run", after=3)
    state = json.loads((folder / "run" / "checkpoints" / "step_5" / "trainer.json").read_text())
    assert state["position"] == position > 5 * 7
    scores = {step: read_log(folder / "run")[step]["metrics"][core] for step in (4, 5)}
    best = max(scores, key=scores.__getitem__)
    assert state["best"] == {"step": best, "value": scores[best]}
    assert {path.name for path in (folder / "run" / "checkpoints").iterdir()} == {"best", f"step_{best}", "step_5"}
    assert (folder / "run" / "checkpoints" / "best").resolve().name == f"step_{best}"


def replays(folder: Path) -> None:
    """The first step again, from its dumped batch and without generating: the same line in the log."""
    replayed = ("run.dir=again", "data.replay=kept/rollouts/step_1.parquet", "run.steps=1", "run.validate_every=0")
    command = Command(folder, *replayed, "data.validation=[]", "data.canary=[]")
    assert command.wait() == 0, command.text
    (first, again) = (comparable(read_log(folder / name), step=1) for name in ("run", "again"))
    assert first == again
    assert_logs_what_check_says(folder / "again", but=["response_length/produced_ratio", "timing_s/reward"])


def comparable(log: list[dict[str, Any]], step: int) -> dict[str, float]:
    """A step's metrics but for those that depend on the clock."""
    (metrics,) = (line["metrics"] for line in log if line["step"] == step)
    return {name: value for name, value in metrics.items() if not name.startswith(("timing_s/", "perf/"))}
