"""Sources that would become other weights than other systems read in them, or that no parser should trip over."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_convert import assert_same_weights, make, problems, run, weights
from test_convert_stacked import load_whole, save_whole

from megappo.convert import destination
from megappo.formats.torch_dist import read_chunks

DEEP = "[" * 100_000
"""More than a parser goes down."""


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "model.safetensors"])
def test_a_file_of_nothing_but_brackets(tmp_path: Path, name: str) -> None:
    folder = make(tmp_path / "model")
    head = len(DEEP).to_bytes(8, "little") if name == "model.safetensors" else b""
    (folder / name).write_bytes(head + DEEP.encode())
    assert problems(folder, tmp_path / "checkpoint").startswith(f"{folder}/{name}: ")


@pytest.mark.parametrize("record", [DEEP, "[1]", "null", '{"made": 1}'])
def test_a_record_that_is_none_is_of_something_else(tmp_path: Path, record: str) -> None:
    folder, target = make(tmp_path / "model"), tmp_path / "checkpoint"
    run(folder, target)
    (target / destination.RECORD).write_text(record)
    run(folder, target, overwrite=True)
    (target / "metadata.json").write_text(DEEP)
    run(target, tmp_path / "back")
    assert_same_weights(folder, tmp_path / "back")


@pytest.mark.parametrize(
    "place", ["../elsewhere/model.safetensors", "inside/model.safetensors", "{}/model.safetensors"]
)
def test_an_index_of_files_elsewhere(tmp_path: Path, place: str) -> None:
    """vLLM would not find them; nor would it be seen that they have changed since."""
    folder = make(tmp_path / "model")
    for name in ("elsewhere", "model/inside"):
        (tmp_path / name).mkdir()
        shutil.copy(folder / "model.safetensors", tmp_path / name)
    index = {name: place.format(tmp_path / "elsewhere") for name in weights(folder)}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    said = problems(folder, tmp_path / "checkpoint")
    assert "model.safetensors, which is not beside it: give files of" in said


def test_a_head_beside_the_embedding_that_it_is_said_to_be(tmp_path: Path) -> None:
    """transformers uses such a head if it is another; a checkpoint would have the embedding alone."""
    folder = make(tmp_path / "model", tie_word_embeddings=True)
    tensors = weights(folder)
    embedding = tensors["model.embed_tokens.weight"]
    assert "lm_head.weight" not in tensors
    save_file({**tensors, "lm_head.weight": embedding.clone()}, folder / "model.safetensors")
    run(folder, tmp_path / "checkpoint")
    run(tmp_path / "checkpoint", tmp_path / "back")
    assert torch.equal(weights(tmp_path / "back")["model.embed_tokens.weight"], embedding)
    other = embedding.clone()
    other[-1, -1] += 1
    for head in (other, embedding.float(), embedding[:-1].clone()):
        save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors")
        said = problems(folder, tmp_path / "other")
        assert said == (
            f"{folder}: tensor lm_head.weight is not model.embed_tokens.weight, as tie_word_embeddings of config.json "
            "says: remove the tensor, or give tie_word_embeddings false"
        )


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("tie_word_embeddings", "false", "tie_word_embeddings: 'false' is neither true nor false"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps: nan is not a positive number"),
        ("rope_parameters", {"rope_theta": float("inf")}, "rope_theta: inf is not a positive number"),
    ],
)
def test_a_config_that_would_be_taken_for_another(tmp_path: Path, key: str, value: Any, words: str) -> None:
    folder = make(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: value}))
    assert problems(folder, tmp_path / "checkpoint") == f"{folder}/config.json: {words}"


def test_what_was_not_finished_is_no_source(tmp_path: Path) -> None:
    """A checkpoint's .metadata is written before its values."""
    run(make(tmp_path / "model"), tmp_path / "whole")
    (tmp_path / "whole").rename(tmp_path / "cut.partial")
    said = problems(tmp_path / "cut.partial", tmp_path / "out")
    assert said == f"{tmp_path}/cut.partial: was not finished: convert or save it again, or rename it if it is whole"
    run(make(tmp_path / "model"), tmp_path / "step_4.partial" / "actor")  # as a run that was killed leaves it
    for source in (tmp_path / "step_4.partial", tmp_path / "step_4.partial" / "actor"):
        assert problems(source, tmp_path / "out").startswith(f"{tmp_path}/step_4.partial: was not finished")


def test_a_model_that_lends_its_config_is_not_replaced(tmp_path: Path) -> None:
    model = make(tmp_path / "models" / "base")
    run(model, tmp_path / "checkpoint")
    for target in (model, model.parent):
        with pytest.raises(ValueError, match="models/base, which has the config: choose a DST elsewhere"):
            run(tmp_path / "checkpoint", target, model=str(model), overwrite=True)
    assert (model / "model.safetensors").is_file()


# --- checkpoints ------------------------------------------------------------------------------------------------------

FC1 = "decoder.layers.{}mlp.linear_fc1.weight"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("second", ["00.", "\u0661."], ids=["a zero in front", "an Arabic one"])
def test_a_layer_by_another_name_is_not_another_layer(tmp_path: Path, second: str) -> None:
    folder = make(tmp_path / "model")
    run(folder, tmp_path / "checkpoint")
    tensors = load_whole(tmp_path / "checkpoint")
    first, last = tensors.pop(FC1.format(""))
    saved = {**tensors, FC1.format("0."): first.clone(), FC1.format(second): last.clone()}
    said = problems(save_whole(saved, tmp_path / "saved"), tmp_path / "back", model=str(folder))
    assert f"tensor {FC1.format(second)} is not part of the model in {folder}/config.json" in said


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.bool, torch.complex64])
def test_a_checkpoint_of_what_no_weight_is(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = make(tmp_path / "model")
    run(folder, tmp_path / "checkpoint")
    tensors = load_whole(tmp_path / "checkpoint")
    tensors[FC1.format("")] = tensors[FC1.format("")].to(dtype)
    saved = save_whole(tensors, tmp_path / "saved")
    name = "of an unknown dtype" if dtype is torch.complex64 else str(dtype).removeprefix("torch.")
    said = problems(saved, tmp_path / "back", model=str(folder))
    assert said == f"{saved}: tensor {FC1.format('')} is {name}: save it as 16- or 32-bit floats"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_plain_checkpoint_is_compared_without_megatron(tmp_path: Path) -> None:
    """Which does not read it."""
    folder = make(tmp_path / "model")
    run(folder, tmp_path / "checkpoint")
    saved = save_whole(load_whole(tmp_path / "checkpoint"), tmp_path / "saved")
    assert len(read_chunks(saved)[1]) < len(read_chunks(tmp_path / "checkpoint")[1])
    words = "equal, element by element (plain torch wrote the checkpoint, which Megatron does not read, so neither side"
    assert words in run(saved, tmp_path / "back", model=str(folder), verify=True)[-1]
