"""Reading safetensors block by block: what is wrong with a folder is said in full, and values land in their places."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import make_model

from megappo.check.model_files import weight_problems
from megappo.formats.safetensors_files import find_tensors, no_weights, set_aside, tensor_files
from megappo.layout.mesh import Layout
from megappo.models.spec import ModelError, ModelSpec, read_model_spec
from megappo.reshard.boxes import Box, megatron_boxes
from megappo.reshard.copies import block
from megappo.reshard.load_weights import load_weights

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model(tmp_path, "qwen2", num_hidden_layers=2, vocab_size=61)


def edit(folder: Path, remove: list[str] = [], **add: torch.Tensor) -> dict[str, torch.Tensor]:  # noqa: B006
    """Rewrite the folder's file without some tensors, with others (dots written as __)."""
    tensors = {name: tensor for name, tensor in load_file(folder / SINGLE).items() if name not in remove}
    tensors.update({name.replace("__", "."): tensor for name, tensor in add.items()})
    save_file(tensors, folder / SINGLE)
    return tensors


def shard(folder: Path) -> dict[str, str]:
    """Cut the folder's one file in two, with an index."""
    tensors = load_file(folder / SINGLE)
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
    (folder / SINGLE).unlink()
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return files


def parameters(spec: ModelSpec, boxes: list[Box], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Local parameters, full of garbage, just large enough for the boxes; the embeddings with room for padding."""
    shapes: dict[str, list[int]] = {}
    for box in boxes:
        end = [low + extent for low, extent in zip(box.local_offset, box.size, strict=True)]
        shapes[box.param] = [max(a, b) for a, b in zip(end, shapes.get(box.param, end), strict=True)]
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if name in shapes and shapes[name][0] > 1:
            shapes[name][0] = 64
    return {name: torch.full(shape, torch.nan, dtype=dtype) for name, shape in shapes.items()}


def load(folder: Path, *, scalar_head: bool = False, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The whole model on one rank, as the loader fills it."""
    spec = read_model_spec(folder)
    boxes = megatron_boxes(spec, Layout(), 0, scalar_head=scalar_head)
    params = parameters(spec, boxes, dtype)
    load_weights(folder, spec, boxes, params, scalar_head=scalar_head)
    return params


def problems(folder: Path, **settings: bool) -> list[str]:
    with pytest.raises(ModelError) as caught:
        load(folder, **settings)
    return list(caught.value.problems)


def test_values_land_and_padding_is_zero(folder: Path) -> None:
    tensors, params = load_file(folder / SINGLE), load(folder)
    assert not any(param.isnan().any() for param in params.values())
    for name, param in (("model.embed_tokens", "embedding.word_embeddings"), ("lm_head", "output_layer")):
        assert torch.equal(params[f"{param}.weight"][:61], tensors[f"{name}.weight"])
        assert not params[f"{param}.weight"][61:].any()
    down = "mlp.linear_fc2.weight", "mlp.down_proj.weight"
    assert torch.equal(params[f"decoder.layers.1.{down[0]}"], tensors[f"model.layers.1.{down[1]}"])


def test_all_problems_at_once(folder: Path) -> None:
    edit(
        folder,
        ["model.norm.weight", "model.layers.0.self_attn.q_proj.bias"],
        model__layers__1__mlp__up_proj__weight=torch.zeros(96, 63),
        model__layers__2__mlp__up_proj__weight=torch.zeros(96, 64),
        visual__patch_embed__weight=torch.zeros(2),
    )
    assert problems(folder) == [
        f"{folder}: tensor model.layers.0.self_attn.q_proj.bias [64] is missing",
        f"{folder}: tensor model.layers.1.mlp.up_proj.weight has shape [96, 63], config.json says [96, 64]",
        f"{folder}: tensor model.layers.2.mlp.up_proj.weight is not part of this family",
        f"{folder}: tensor model.norm.weight [64] is missing",
        f"{folder}: tensor visual.patch_embed.weight is not part of this family",
        f"{folder}: give the config.json that the weights belong to, or weights that are whole",
    ]
    edit(folder, [name for name in load_file(folder / SINGLE) if ".1." in name])  # as with a config.json of more layers
    many = problems(folder)
    assert len(many) == 10 and many[8:] == [
        f"{folder}: 8 more tensors are so",
        f"{folder}: give the config.json that the weights belong to, or weights that are whole",
    ]


def test_nothing_is_written_if_the_folder_is_wrong(folder: Path) -> None:
    edit(folder, ["model.norm.weight"])
    spec = read_model_spec(folder)
    boxes = megatron_boxes(spec, Layout(), 0)
    params = parameters(spec, boxes)
    with pytest.raises(ModelError):
        load_weights(folder, spec, boxes, params)
    assert all(param.isnan().all() for param in params.values())


def test_tensors_that_nobody_needs_are_passed_over(folder: Path) -> None:
    expected = load(folder)
    edit(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    assert all(torch.equal(param, expected[name]) for name, param in load(folder).items())


def test_a_tied_head_may_be_written_out(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    params = load(folder)  # the file still holds lm_head.weight
    assert "output_layer.weight" not in params
    edit(folder, ["lm_head.weight"])
    assert all(torch.equal(param, params[name]) for name, param in load(folder).items())


def test_an_untied_head_may_not_be_missing(folder: Path) -> None:
    edit(folder, ["lm_head.weight"])
    assert problems(folder)[0] == f"{folder}: tensor lm_head.weight [61, 64] is missing"
    load(folder, scalar_head=True)  # a critic has no use for it


def test_scalar_head_is_zero_if_fresh_and_read_if_there(folder: Path) -> None:
    assert torch.equal(load(folder, scalar_head=True)["output_layer.weight"], torch.zeros(1, 64))
    score = torch.randn(1, 64)
    edit(folder, ["lm_head.weight"], score__weight=score)
    assert torch.equal(load(folder, scalar_head=True)["output_layer.weight"], score)
    edit(folder, score__weight=torch.zeros(2, 64))
    said = f"{folder}: tensor score.weight has shape [2, 64], config.json says [1, 64]"
    assert problems(folder, scalar_head=True)[0] == said


def test_several_files_load_as_one(folder: Path) -> None:
    expected = load(folder)
    files = shard(folder)
    assert tensor_files(folder) == {name: folder / file for name, file in files.items()}
    assert all(torch.equal(param, expected[name]) for name, param in load(folder).items())


def test_several_forms_of_the_weights_in_one_folder(folder: Path) -> None:
    """transformers takes the single file, vLLM what the index names; both take safetensors before pickles."""
    whole, expected = (folder / SINGLE).read_bytes(), load(folder)
    assert set_aside(folder) == []
    (folder / "pytorch_model.bin").touch()
    shutil.copy(folder / SINGLE, folder / "model.fp16.safetensors")
    assert set_aside(folder) == [
        f"{folder}: pytorch_model.bin is not read, since there are safetensors: remove it if it is not the same",
        f"{folder}: model.fp16.safetensors is not read beside model.safetensors, but vLLM would read both: remove one "
        "of them",
    ]
    assert all(torch.equal(param, expected[name]) for name, param in load(folder).items())
    (folder / "model.fp16.safetensors").unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(load_file(folder / SINGLE), SINGLE)}))
    assert set_aside(folder) == [
        f"{folder}: pytorch_model.bin is not read, since there are safetensors: remove it if it is not the same"
    ]
    assert all(torch.equal(param, expected[name]) for name, param in load(folder).items())  # both say the same
    shard(folder)
    (folder / SINGLE).write_bytes(whole)
    both = (
        f"{folder}: has model.safetensors, which transformers reads, and model.safetensors.index.json of other files, "
        "which vLLM reads: remove the one that is not meant"
    )
    assert problems(folder) == [both]  # of who loads weights,
    with pytest.raises(ModelError) as caught:
        find_tensors(folder)  # of who converts,
    assert str(caught.value) == both
    assert list(weight_problems(folder, {})) == [both]  # and of who checks


def test_an_index_that_does_not_fit_its_files(folder: Path) -> None:
    shard(folder)
    one, two = (folder / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    tensors = load_file(two)
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, two)
    assert problems(folder) == [f"{two}: lacks tensor model.embed_tokens.weight, which the index places there"]
    one.unlink()
    two.unlink()
    there = f"of 2 files that it names, there is no {one.name} and 1 more: add what is missing"
    assert problems(folder) == [f"{folder / INDEX}: {there}"]


def test_files_that_cannot_be_read(folder: Path) -> None:
    whole = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(whole[: len(whole) // 2])  # an interrupted download
    (problem,) = problems(folder)
    assert problem.startswith(f"{folder / SINGLE}: cannot be read as safetensors (")
    (folder / SINGLE).unlink()
    assert problems(folder) == [
        f"{folder}: has no weights: add model.safetensors, or model.safetensors.index.json and its shards"
    ]
    (folder / "model-00001-of-00002.safetensors").write_bytes(whole)
    assert problems(folder) == [
        f"{folder}: has model-00001-of-00002.safetensors, but neither model.safetensors nor "
        "model.safetensors.index.json: add the one that is missing"
    ]
    (folder / "pytorch_model.bin").write_bytes(whole)
    assert problems(folder) == [
        f"{folder}: holds its weights in pickles (pytorch_model.bin): save them as safetensors (save_pretrained does)"
    ]
    (folder / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    (problem,) = problems(folder)
    assert "a pointer of Git LFS: git lfs pull" in problem
    (folder / INDEX).write_text("{}")
    (problem,) = problems(folder)
    assert problem.startswith(f"{folder / INDEX}: is no index of safetensors files")


def write_header(path: Path, header: object, num_bytes: int) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(num_bytes))


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([("F32", [2, 3], [0, 24]), ("F32", [2], [16, 24])], "tensor b: begins at 16 instead of 24"),
        ([("F32", [2], [0, 8]), ("F32", [2], [16, 24])], "tensor b: begins at 16 instead of 8"),
        ([("F32", [2], [8, 16]), ("F32", [2], [16, 24])], "tensor a: begins at 8 instead of 0"),
        ([("F32", [3], [0, 8]), ("F32", [4], [8, 24])], "tensor a: has 8 bytes, not those of F32 [3]"),
        ([("BF16", [2], [0, 8]), ("F32", [4], [8, 24])], "tensor a: has 8 bytes, not those of BF16 [2]"),
        ([("F32", [-2, -1], [0, 8]), ("F32", [4], [8, 24])], "its shape is [-2, -1]"),
        ([("U16", [4], [0, -4])], "its data_offsets [0, -4]"),
        ([("F32", "2", [0, 8])], "its shape is 2"),
        ([([], [2], [0, 8])], "TypeError"),
        ([("F32", [2], [0, 8])], "bytes instead of"),
    ],
)
def test_a_header_whose_numbers_do_not_fit_each_other(
    tmp_path: Path, entries: list[tuple[object, object, object]], words: str
) -> None:
    """Its file has as many bytes as the header says, but they would be taken for other numbers."""
    header = {
        name: dict(zip(("dtype", "shape", "data_offsets"), entry, strict=True))
        for name, entry in zip("ab", entries, strict=False)
    }
    write_header(tmp_path / SINGLE, header, 24)
    with pytest.raises(ModelError) as caught:
        find_tensors(tmp_path)
    text = str(caught.value)
    assert text.startswith(f"{tmp_path / SINGLE}: cannot be read as safetensors (") and words in text


def test_an_unknown_type_matters_only_where_it_is_needed(tmp_path: Path) -> None:
    header = {
        "b": {"dtype": "U16", "shape": [2], "data_offsets": [8, 12]},
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    }
    write_header(tmp_path / SINGLE, header, 12)
    found = find_tensors(tmp_path)
    assert list(found) == ["b", "a"] and found["a"].shape == (2,)
    assert no_weights(tmp_path, found) == [f"{tmp_path}: tensor b is U16: give 16- or 32-bit floats"]


def test_weights_are_converted_to_the_models_dtype(folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / SINGLE)
    down = "decoder.layers.0.mlp.linear_fc2.weight"
    expected = tensors["model.layers.0.mlp.down_proj.weight"].bfloat16()
    wide, narrow = load(folder)[down], load(folder, dtype=torch.bfloat16)[down]
    assert wide.dtype == torch.float32 and torch.equal(wide, expected.float())
    assert narrow.dtype == torch.bfloat16 and torch.equal(narrow, expected)


def test_a_rank_reads_its_own_blocks_only(folder: Path) -> None:
    """Two tensor-parallel ranks: each gets the columns of the down projection that are its own."""
    spec, tensors = read_model_spec(folder), load_file(folder / SINGLE)
    for rank in range(2):
        boxes = megatron_boxes(spec, Layout(tp=2), rank)
        params = parameters(spec, boxes)
        load_weights(folder, spec, boxes, params)
        own = tensors["model.layers.0.mlp.down_proj.weight"][:, 48 * rank : 48 * (rank + 1)]
        assert torch.equal(params["decoder.layers.0.mlp.linear_fc2.weight"], own)


def test_block() -> None:
    assert torch.arange(12).view(3, 4)[block((1, 2), (2, 1))].tolist() == [[6], [10]]
