"""Qwen2.5's shapes, without weights."""

from __future__ import annotations

import json
from pathlib import Path

from small_project import MODEL

from megappo.models.spec import ModelSpec, read_model_spec

SHAPES = {
    "0.5B": (24, 896, 14, 2, 4864, 151936),
    "7B": (28, 3584, 28, 4, 18944, 152064),
    "32B": (64, 5120, 40, 8, 27648, 152064),
    "72B": (80, 8192, 64, 8, 29568, 152064),
}
"""Layers, hidden size, heads, key/value heads, MLP columns, vocabulary."""


def write_qwen(folder: Path, size: str = "0.5B") -> ModelSpec:
    """Write ``config.json``."""
    layers, hidden, heads, kv_heads, mlp, vocabulary = SHAPES[size]
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "intermediate_size": mlp,
        "vocab_size": vocabulary,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": size == "0.5B",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**MODEL, **sizes}))
    return read_model_spec(folder)
