"""Reading a Hugging Face config: what is understood, what is refused and how, and the weight table of each family."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from tiny import LLAMA3_ROPE, make_model

from megappo.models import families
from megappo.models.spec import Llama3RopeScaling, ModelError, ModelSpec, read_model_spec

CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 61,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
}


def folder_with(tmp_path: Path, config: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def spec_of(tmp_path: Path, **changes: Any) -> ModelSpec:
    return read_model_spec(folder_with(tmp_path, {**CONFIG, **changes}))


def problems_of(tmp_path: Path, **changes: Any) -> list[str]:
    """The problems of CONFIG with changes (``None`` takes a key away), without the path that each begins with."""
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    with pytest.raises(ModelError) as caught:
        read_model_spec(folder_with(tmp_path, config))
    begin = f"{tmp_path / 'config.json'}: "
    assert all(problem.startswith(begin) for problem in caught.value.problems)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return [problem[len(begin) :] for problem in caught.value.problems]


LLAMA: dict[str, Any] = {"model_type": "llama"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "family": (
        {"model_type": "gpt2"},
        "model_type 'gpt2' is not a family we know: known are llama, mixtral, qwen2, qwen3, qwen3_moe",
    ),
    "no family": (
        {"model_type": None},
        "model_type None is not a family we know: known are llama, mixtral, qwen2, qwen3, qwen3_moe",
    ),
    "dense layers among experts": (
        {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 32, "mlp_only_layers": [0]},
        "mlp_only_layers: [0] is not supported for qwen3_moe: only [] is",
    ),
    "no experts": ({"model_type": "mixtral"}, "num_local_experts: None is not a positive integer"),
    "sliding window": (
        {"use_sliding_window": True},
        "use_sliding_window: True is not supported for qwen2: only False is",
    ),
    "sliding layers": (
        {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
        "layer_types: sliding_attention is not supported: only full_attention is",
    ),
    "partial rotary": (
        {"partial_rotary_factor": 0.5},
        "partial_rotary_factor: 0.5 is not supported for qwen2: only 1.0 is",
    ),
    "partial rotary, transformers 5": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
        "rope_parameters.partial_rotary_factor: 0.25 is not supported: only 1.0 is",
    ),
    "activation": ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported for qwen2: only 'silu' is"),
    "quantised": (
        {"quantization_config": {"quant_method": "awq", "bits": 4}},
        "quantization_config: weights quantised by 'awq' cannot be trained: give the unquantised model",
    ),
    "yarn": (
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        "rope_scaling: rope_type 'yarn' is not supported: known are default, llama3",
    ),
    "yarn, transformers 5": (
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}},
        "rope_scaling: rope_type 'yarn' is not supported: known are default, llama3",
    ),
    "half a llama3 rope": (
        {"rope_parameters": {key: LLAMA3_ROPE[key] for key in LLAMA3_ROPE if key != "low_freq_factor"}},
        "rope_scaling: llama3 needs low_freq_factor",
    ),
    "llama attention bias": (
        {**LLAMA, "attention_bias": True},
        "attention_bias: True is not supported for llama: only False is",
    ),
    "llama mlp bias": ({**LLAMA, "mlp_bias": True}, "mlp_bias: True is not supported for llama: only False is"),
    "qwen3 attention bias": (
        {"model_type": "qwen3", "attention_bias": True},
        "attention_bias: True is not supported for qwen3: only False is",
    ),
    "missing": ({"vocab_size": None}, "vocab_size: None is not a positive integer"),
    "zero": ({"num_hidden_layers": 0}, "num_hidden_layers: 0 is not a positive integer"),
    "heads of a fraction": ({"head_dim": 1.5}, "head_dim: 1.5 is not a positive integer"),
    "key/value heads in quotes": ({"num_key_value_heads": "2"}, "num_key_value_heads: '2' is not a positive integer"),
    "endless": ({"num_hidden_layers": 10**30}, f"num_hidden_layers: {10**30} is more than 10000: the file is damaged"),
    "kinds": ({"layer_types": 7}, "layer_types: 7 is not a list of names"),
    "kinds of kinds": ({"layer_types": [[1]]}, "layer_types: [[1]] is not a list of names"),
    "rope": ({"rope_scaling": "linear"}, "rope_scaling: 'linear' is not an object"),
    "base of rope": ({"rope_theta": "1e4"}, "rope_theta: '1e4' is not a positive number"),
    "no base inside": ({"rope_parameters": {"rope_theta": None}}, "rope_theta: None is not a positive number"),
    "base inside": ({"rope_parameters": {"rope_theta": [1]}}, "rope_theta: [1] is not a positive number"),
    "text": ({"hidden_size": "64"}, "hidden_size: '64' is not a positive integer"),
    "fraction": ({"num_hidden_layers": 2.5}, "num_hidden_layers: 2.5 is not a positive integer"),
    "negative": ({"rms_norm_eps": -1e-6}, "rms_norm_eps: -1e-06 is not a positive number"),
    "key/value heads": ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide num_attention_heads 4"),
    "head size": (
        {"hidden_size": 66},
        "hidden_size: 66 is no multiple of num_attention_heads 4, and head_dim is not given",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(tmp_path: Path, name: str) -> None:
    changes, message = REFUSED[name]
    assert problems_of(tmp_path, **changes) == [message]


def test_all_problems_at_once(tmp_path: Path) -> None:
    names = ["missing", "sliding window", "activation", "quantised", "yarn"]
    changes = {key: value for name in names for key, value in REFUSED[name][0].items()}
    assert sorted(problems_of(tmp_path, **changes)) == sorted(REFUSED[name][1] for name in names)


def test_folders_that_hold_no_model(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    for prepare, folder, message in [
        (None, nowhere, f"{nowhere}: no such folder: give the path of a Hugging Face model folder"),
        (None, tmp_path, f"{tmp_path}: has no config.json: give the path of a Hugging Face model folder"),
        ("{", tmp_path, f"{tmp_path}/config.json: cannot be read as JSON"),
        ("[]", tmp_path, f"{tmp_path}/config.json: holds list, not an object"),
    ]:
        if prepare:
            (tmp_path / "config.json").write_text(prepare)
        with pytest.raises(ModelError) as caught:
            read_model_spec(folder)
        assert len(caught.value.problems) == 1
        assert caught.value.problems[0].startswith(message)


def test_harmless_settings_are_accepted(tmp_path: Path) -> None:
    spec_of(
        tmp_path,
        use_sliding_window=False,
        sliding_window=4096,
        max_window_layers=2,
        layer_types=["full_attention"] * 3,
        hidden_act="silu",
        quantization_config=None,
        rope_scaling=None,
        rope_theta=None,
        head_dim=None,
        attention_dropout=0.0,
    )


def test_rope_before_transformers_5(tmp_path: Path) -> None:
    assert spec_of(tmp_path, rope_theta=1e6).rope_theta == 1e6
    assert spec_of(tmp_path).rope_theta == 10000.0  # transformers' own default
    llama3 = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    spec = spec_of(tmp_path, **LLAMA, rope_theta=5e5, rope_scaling=llama3)
    assert (spec.rope_theta, spec.rope_scaling) == (5e5, Llama3RopeScaling(4.0, 1.0, 4.0, 32))


def test_rope_since_transformers_5(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert (spec.rope_theta, spec.rope_scaling) == (1e6, None)
    spec = spec_of(tmp_path, **LLAMA, rope_parameters=LLAMA3_ROPE)
    assert (spec.rope_theta, spec.rope_scaling) == (10000.0, Llama3RopeScaling(4.0, 1.0, 4.0, 32))


def test_sizes(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    assert (spec.num_layers, spec.hidden_size, spec.ffn_hidden_size, spec.vocab_size) == (3, 64, 96, 61)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 2, 16)
    assert (spec.qkv_bias, spec.qk_norm, spec.tied_embeddings) == (True, False, False)
    assert spec_of(tmp_path, num_key_value_heads=None).num_kv_heads == 4
    assert spec_of(tmp_path, head_dim=40).head_dim == 40
    assert spec_of(tmp_path, tie_word_embeddings=True).tied_embeddings
    qwen3 = spec_of(tmp_path, model_type="qwen3")
    assert (qwen3.head_dim, qwen3.qkv_bias, qwen3.qk_norm) == (128, False, True)


def test_sizes_of_mixtures(tmp_path: Path) -> None:
    """In Qwen3-MoE ``intermediate_size`` is that of dense layers, of which there are none."""
    qwen = spec_of(tmp_path, model_type="qwen3_moe", num_experts=8, moe_intermediate_size=32)
    assert (qwen.num_experts, qwen.ffn_hidden_size, qwen.qk_norm, qwen.head_dim) == (8, 32, True, 128)
    mixtral = spec_of(tmp_path, model_type="mixtral", num_local_experts=2)
    assert (mixtral.num_experts, mixtral.ffn_hidden_size, mixtral.qk_norm) == (2, 96, False)
    assert spec_of(tmp_path).num_experts == 0


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "qwen3_moe", "mixtral"])
def test_table_equals_transformers(tmp_path: Path, family: str, tied: bool) -> None:
    """Names and shapes against the files that transformers writes, number of weights against its model's."""
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    folder = make_model(tmp_path, family, num_hidden_layers=2, vocab_size=61, tie_word_embeddings=tied)
    spec = read_model_spec(folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        written = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert spec.hf_shapes() == written
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert spec.num_parameters() == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_scalar_head_takes_the_place_of_the_language_model_head(tmp_path: Path, tied: bool) -> None:
    spec = spec_of(tmp_path, tie_word_embeddings=tied)
    plain, scalar = spec.hf_shapes(), spec.hf_shapes(scalar_head=True)
    assert scalar.pop("score.weight") == (1, 64)
    assert scalar == {name: shape for name, shape in plain.items() if name != "lm_head.weight"}
    assert spec.num_parameters(scalar_head=True) == spec.num_parameters() + 64 - (0 if tied else 61 * 64)


def test_a_family_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is put beside the others is a family at once: with the layers of Qwen2 but no key/value biases."""
    (tmp_path / "newcomer.py").write_text(
        "from megappo.models.families.family import Family\n"
        "from megappo.models.parameters import ATTENTION, GATED_MLP, NORMS\n"
        "FAMILY = Family('newcomer', 'NewcomerForCausalLM', (*NORMS, *ATTENTION, *GATED_MLP), refused={'odd': 1})\n"
    )
    importlib.invalidate_caches()
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    families.known_families.cache_clear()
    try:
        assert spec_of(tmp_path, model_type="newcomer").hf_shapes() == spec_of(tmp_path, **LLAMA).hf_shapes()
        assert problems_of(tmp_path, model_type="newcomer", odd=2) == [
            "odd: 2 is not supported for newcomer: only 1 is"
        ]
    finally:
        families.known_families.cache_clear()
