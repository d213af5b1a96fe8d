"""Adapters that are merged into a model's weights, where these or the adapters are not as they should be."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from test_convert import make, problems, run, weights
from test_convert_stacked import save_whole

from megappo.models.lora import FILE, Lora, is_trained
from megappo.models.spec import read_model_spec
from megappo.reshard.megatron_tensors import megatron_tensors, stacked_shapes

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

LORA = Lora(4, 8.0, ("q_proj", "down_proj"))
Q = "model.layers.0.self_attn.q_proj.weight"


def save_adapters(folder: Path, model: Path, factor: float) -> Path:
    """A checkpoint of adapters whose values are all the same."""
    spec = replace(read_model_spec(model), lora=LORA)
    tensors = [t for name, t in megatron_tensors(spec).items() if is_trained(name, scalar_head=False)]
    shapes = stacked_shapes(tensors)
    save_whole({key: torch.full(shape, factor) for key, shape in shapes.items()}, folder)
    (folder / FILE).write_text(json.dumps(asdict(LORA)))
    return folder


def test_adapters_that_went_wrong_are_named(tmp_path: Path) -> None:
    """And not the weight that they belong to, which is as it should be."""
    model = make(tmp_path / "model")
    run(save_adapters(tmp_path / "good", model, 0.5), tmp_path / "merged", model=str(model))
    expected = weights(model)[Q].float() + LORA.alpha / LORA.rank * 4 * 0.25
    assert torch.equal(weights(tmp_path / "merged")[Q], expected)
    for factor, dtype in ((300.0, "float16"), (torch.nan, "float32"), (1e30, "float32")):
        wrong = save_adapters(tmp_path / f"{factor}", model, factor)
        said = problems(wrong, tmp_path / "out", model=str(model), dtype=dtype, processes=2)
        assert said.startswith("tensor model.") and f" is beyond {dtype} with its adapters merged into it: give" in said


def test_a_model_whose_head_is_not_the_one_it_says(tmp_path: Path) -> None:
    model = make(tmp_path / "model", tie_word_embeddings=True)
    adapters = save_adapters(tmp_path / "adapters", model, 0.5)
    run(adapters, tmp_path / "merged", model=str(model))
    head = {"lm_head.weight": torch.zeros(70, 64).bfloat16()}
    save_file({**weights(model), **head}, model / "model.safetensors")
    said = problems(adapters, tmp_path / "out", model=str(model))
    assert said.startswith(f"{model}: tensor lm_head.weight is not model.embed_tokens.weight, as tie_word_embeddings")
