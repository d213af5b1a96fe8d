"""Tiny models in Hugging Face's own code, as the reference that ours is held against."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from megappo.data import batch

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def make_model(folder: Path, family: str = "qwen2", *, seed: int = 0, scale: float = 0.1, **changes: Any) -> Path:
    """Save a random model with 4 heads, 2 key/value heads and 4 layers, weights about ``scale``; return its folder."""
    import transformers

    classes = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama", "qwen3_moe": "Qwen3Moe", "mixtral": "Mixtral"}
    config_class = getattr(transformers, classes[family] + "Config")
    settings: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 1,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    if family == "qwen3":
        settings["head_dim"] = 32  # not hidden / heads
    if family == "qwen3_moe":
        settings |= {"head_dim": 32, "num_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
    if family == "mixtral":
        settings |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    model_class = getattr(transformers, config_class.__name__.replace("Config", "ForCausalLM"))
    torch.manual_seed(seed)
    model = model_class(config_class(**{**settings, **changes}))
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.normal_(0, scale)  # biases too; large enough that logits differ well
            if "norm" in name:
                param.add_(1.0)
    model.to(torch.float32).save_pretrained(folder)
    return folder


def random_rows(count: int, *, vocab: int = 64, seed: int = 0, longest: int = 12) -> pa.Table:
    """Rows of random tokens with random old log-probabilities, advantages and so on."""
    rng = np.random.default_rng(seed)
    prompt_lengths, response_lengths = rng.integers(1, longest, count), rng.integers(1, longest, count)
    total = int(response_lengths.sum())

    def ragged_floats(scale: float, shift: float = 0.0) -> pa.ListArray:
        return batch.ragged((rng.standard_normal(total) * scale + shift).astype(np.float32), response_lengths)

    return pa.table(
        {
            "id": pa.array(rng.permutation(count * 3)[:count], pa.int64()),
            "prompt_ids": batch.ragged(rng.integers(0, vocab, prompt_lengths.sum()).astype(np.int32), prompt_lengths),
            "response_ids": batch.ragged(rng.integers(0, vocab, total).astype(np.int32), response_lengths),
            "logprobs": ragged_floats(0.3, -4.0),
            "ref_logprobs": ragged_floats(0.3, -4.0),
            "advantages": ragged_floats(1.0),
            "values": ragged_floats(0.5),
            "returns": ragged_floats(1.0),
        }
    )
