"""A whole run in which all roles, two engines of tensor parallel 2 among them, take turns on one pool's devices."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from small_run import CONFIG, Command, make_run_folder

from megappo.data import batch

POOLS = "pools: {all: {devices_per_node: 4}}\n"
ROLES = """\
roles:
  actor: {pool: all, tp: 2, pp: 2, sequence_parallel: true, micro_batch_tokens: 100, offload: all}
  critic: {pool: all, micro_batch_tokens: 90, offload: optimizer, recompute: full}
  reference: {pool: all, tp: 2, micro_batch_tokens: 80}
  rollout: {pool: all, tp: 2, samples_per_prompt: 3, kv_cache_gib: 0.1}
  reward: {function: "score.py:compute_score", processes: 1}
"""


def test_all_roles_on_one_pool(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path / "work")
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
    moved = np.abs(batch.flat(rows, "logprobs") - batch.flat(rows, "ref_logprobs"))
    assert moved.mean() > 1e-3  # there was an update to carry over
