"""What a Hugging Face ``config.json`` says, and what is wrong with it: every problem, each with its key and value."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from megappo.models.families import Family

LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

_REQUIRED = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
)

_MOST_LAYERS = 10_000
"""More is a damaged file, and would fill the memory with names."""


def find_problems(raw: dict[str, Any], family: Family) -> list[str]:
    """Settings that are missing or damaged, or that we would compute wrongly."""
    return list(_mistyped(raw)) or [*_missing(raw, family), *_refused(raw, family)]


def _mistyped(raw: dict[str, Any]) -> Iterator[str]:
    """What later questions could not even be asked of."""
    for key in ("num_key_value_heads", "head_dim"):
        value = raw.get(key)
        if isinstance(value, bool) or not isinstance(value, int | None) or (value is not None and value <= 0):
            yield f"{key}: {value!r} is not a positive integer"
    for key in ("rope_parameters", "rope_scaling", "quantization_config"):
        if not isinstance(raw.get(key), dict | None):
            yield f"{key}: {raw[key]!r} is not an object"
    if not isinstance(raw.get("layer_types"), list | None) or not all(
        isinstance(kind, str) for kind in raw.get("layer_types") or ()
    ):
        yield f"layer_types: {raw['layer_types']!r} is not a list of names"
    layers = raw.get("num_hidden_layers")
    if isinstance(layers, int) and layers > _MOST_LAYERS:
        yield f"num_hidden_layers: {layers} is more than {_MOST_LAYERS}: the file is damaged"
    rope = raw.get("rope_parameters") or raw.get("rope_scaling")
    numbers = {} if raw.get("rope_theta") is None else {"rope_theta": raw["rope_theta"]}
    if isinstance(rope, dict):
        numbers |= {key: rope[key] for key in ("rope_theta", *LLAMA3_KEYS) if key in rope}
    for key, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            yield f"{key}: {value!r} is not a positive number"
    if not isinstance(raw.get("tie_word_embeddings"), bool | None):
        yield f"tie_word_embeddings: {raw['tie_word_embeddings']!r} is neither true nor false"


def _missing(raw: dict[str, Any], family: Family) -> Iterator[str]:
    for key in (*_REQUIRED, family.ffn, *experts(raw, family)):
        value = raw.get(key)
        real = key == "rms_norm_eps"
        kind = int | float if real else int
        if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < math.inf:
            yield f"{key}: {value!r} is not a positive {'number' if real else 'integer'}"
    heads, kv_heads = raw.get("num_attention_heads"), raw.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(kv_heads, int) and (kv_heads <= 0 or heads % kv_heads):
        yield f"num_key_value_heads: {kv_heads} does not divide num_attention_heads {heads}"
    hidden = raw.get("hidden_size")
    if isinstance(heads, int) and isinstance(hidden, int) and heads > 0 and not raw.get("head_dim") and hidden % heads:
        yield f"hidden_size: {hidden} is no multiple of num_attention_heads {heads}, and head_dim is not given"


def experts(raw: dict[str, Any], family: Family) -> tuple[str, ...]:
    """The key that tells the number of experts, if the family has any."""
    return tuple(key for key in family.experts if raw.get(key) is not None)[:1] or family.experts[:1]


def rotary(raw: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings: ``rope_parameters`` (transformers 5), or ``rope_theta`` and ``rope_scaling`` (before)."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope.setdefault("rope_theta", raw.get("rope_theta") or 10000.0)
    rope.setdefault("rope_type", rope.get("type", "default"))
    return rope


def _refused(raw: dict[str, Any], family: Family) -> Iterator[str]:
    for key, accepted in {**family.refused, "hidden_act": "silu", "partial_rotary_factor": 1.0}.items():
        if raw.get(key) not in (None, accepted):
            yield f"{key}: {raw[key]!r} is not supported for {family.model_type}: only {accepted!r} is"
    sliding = sorted({kind for kind in raw.get("layer_types") or () if kind != "full_attention"})
    if sliding:
        yield f"layer_types: {', '.join(sliding)} is not supported: only full_attention is"
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        yield f"quantization_config: weights quantised by {method!r} cannot be trained: give the unquantised model"
    rope = rotary(raw)
    if rope["rope_type"] not in ("default", "llama3"):
        yield f"rope_scaling: rope_type {rope['rope_type']!r} is not supported: known are default, llama3"
    if rope["rope_type"] == "llama3":
        yield from (f"rope_scaling: llama3 needs {key}" for key in LLAMA3_KEYS if key not in rope)
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield f"rope_parameters.partial_rotary_factor: {rope['partial_rotary_factor']!r} is not supported: only 1.0 is"
