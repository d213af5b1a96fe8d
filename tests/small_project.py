"""A small folder with everything that a good configuration names, made on the spot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megappo.check import Report, check_file
from megappo.models.spec import read_model_spec

CONFIG = """\
run: {dir: run, steps: 10, device: cpu}
model: model
data: {train: train.parquet, validation: [validation.parquet], prompts_per_step: 8, max_prompt: 16, max_response: 16}
pools:
  train: {devices_per_node: 4}
  value: {devices_per_node: 2}
  serve: {devices_per_node: 2}
roles:
  actor: {pool: train, tp: 2, pp: 2}
  critic: {pool: value, pp: 2}
  reference: {pool: value, tp: 2}
  rollout: {pool: serve, samples_per_prompt: 4}
  reward: {function: score.py:compute_score}
ppo: {mini_batch: 16, actor_lr: 1e-6, critic_lr: 1e-5}
"""

MODEL = {
    "model_type": "qwen2",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "head_dim": 32,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}


def write_safetensors(path: Path, shapes: dict[str, Sequence[int]]) -> None:
    """Zeros in float32, written by hand: a length, a JSON header, the bytes."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 4
        for extent in shape:
            size *= extent
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def write_model(folder: Path, **changes: Any) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**MODEL, **changes}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    write_safetensors(folder / "model.safetensors", dict(read_model_spec(folder).hf_shapes()))


def write_prompts(path: Path, rows: int = 20, drop: str = "", **changes: Any) -> None:
    row = {
        "data_source": "arithmetic",
        "prompt": "1+1=",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 0},
        **changes,
    }
    row.pop(drop, None)
    table = pa.Table.from_pylist([row] * max(rows, 1))
    pq.write_table(table.slice(0, rows), path)


REPLAY: dict[str, Any] = {
    "id": 1,
    "prompt_index": 0,
    "data_source": "sums",
    "ground_truth": "3",
    "prompt_text": "1+2=",
    "extra_info": "{}",
    "prompt_ids": [3, 4],
    "response_ids": [5, 6],
    "rollout_logprobs": [-1.0, -2.0],
    "finish_reason": "stop",
    "values": [0.0, 0.0],
}
"""A row of a batch that steps can train on."""


@dataclass
class Project:
    """A folder with everything that a good configuration names; the working folder while a test runs."""

    folder: Path

    def edit(self, old: str, new: str) -> None:
        path = self.folder / "config.yaml"
        text = path.read_text()
        assert text.count(old) == 1, f"{old!r} must be in the file once"
        path.write_text(text.replace(old, new))

    def report(self, *overrides: str) -> Report:
        return check_file("config.yaml", overrides)[1]


def make_project(folder: Path) -> Project:
    """Model, prompts, reward and configuration, named relative to ``folder``."""
    write_model(folder / "model")
    write_prompts(folder / "train.parquet")
    write_prompts(folder / "validation.parquet", rows=5)
    (folder / "score.py").write_text("def compute_score(**arguments): return 0.0\n")
    (folder / "config.yaml").write_text(CONFIG)
    return Project(folder)
