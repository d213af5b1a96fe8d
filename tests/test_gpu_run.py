"""A whole run on one GPU: every role takes turns, leaves the device and comes back; weights go through CUDA IPC."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from small_run import CONFIG, Command, make_run_folder

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
