"""Qwen2.5-0.5B's shape, without weights."""

from __future__ import annotations

import json
from pathlib import Path

from small_project import MODEL

from megappo.models.spec import ModelSpec, read_model_spec

SIZES = {
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
}


def write_qwen(folder: Path) -> ModelSpec:
    """Write ``config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**MODEL, **SIZES}))
    return read_model_spec(folder)
