"""Boxes: they tile every tensor, agree with Megatron's own shards, and put each weight where Megatron wants it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from random_layouts import served, trained
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from tiny import make_model

from megappo.layout.mesh import Layout
from megappo.models.spec import ModelSpec, read_model_spec
from megappo.reshard.boxes import Box, megatron_boxes, megatron_shards, vllm_boxes, vllm_shards
from megappo.reshard.copies import block


def window(offset: Iterable[int], size: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))


def cover(shapes: dict[str, tuple[int, ...]], boxes: Iterable[Box]) -> dict[str, np.ndarray]:
    """How many boxes hold each element of each global tensor; no box may reach over an edge."""
    counts = {name: np.zeros(shape, int) for name, shape in shapes.items()}
    for box in boxes:
        assert counts[box.name][window(box.offset, box.size)].shape == box.size
        counts[box.name][window(box.offset, box.size)] += 1
    return counts


def assert_no_local_overlap(boxes: list[Box]) -> dict[str, np.ndarray]:
    """Boxes never share an element of a local parameter; the parameters as masks of what the boxes fill."""
    ends: dict[str, Any] = {}
    for box in boxes:
        lead = len(box.local_offset) - len(box.size)  # an expert's index
        ends[box.param] = np.maximum(ends.get(box.param, 0), np.add(box.local_offset, (1,) * lead + box.size))
    masks = {name: np.zeros(tuple(end), bool) for name, end in ends.items()}
    for box in boxes:
        at = block(box.local_offset, box.size)
        assert not masks[box.param][at].any()
        masks[box.param][at] = True
    return masks


def bare(boxes: Iterable[Box]) -> list[tuple[Any, ...]]:
    """Boxes without their rank."""
    return [(*box[:3], *box[4:]) for box in boxes]


@given(trained())
@settings(deadline=None, max_examples=80)
def test_megatron_ranks_hold_everything_and_each_replica_once(model: tuple[ModelSpec, Layout]) -> None:
    spec, layout = model
    stage = layout.tp * layout.cp * layout.dp
    for scalar_head in (False, True):
        boxes = {rank: megatron_boxes(spec, layout, rank, scalar_head=scalar_head) for rank in range(layout.world)}
        for name, counts in cover(spec.hf_shapes(scalar_head=scalar_head), chain(*boxes.values())).items():
            whole = "norm" in name or name == "score.weight" or ".gate.weight" in name  # on every tensor-parallel rank
            tied = spec.tied_embeddings and not scalar_head and layout.pp > 1 and "embed" in name
            dense = layout.cp * layout.dp * (layout.tp if whole else 2 if tied else 1)
            assert (counts == (stage // (layout.expert_tp * layout.ep) if ".experts." in name else dense)).all(), name
        for held in boxes.values():
            masks = assert_no_local_overlap(held)
            assert all(mask.all() for mask in masks.values())  # and no holes


@given(trained())
@settings(deadline=None, max_examples=40)
def test_shards_are_what_their_ranks_hold(model: tuple[ModelSpec, Layout]) -> None:
    spec, layout = model
    found: dict[int, list[tuple[Any, ...]]] = {rank: [] for rank in range(layout.world)}
    for shard in megatron_shards(spec, layout, fused_norms=True):
        assert {box.rank for box in shard.boxes} <= {shard.ranks[0]}
        for rank in shard.ranks:
            found[rank] += bare(shard.boxes)
    for rank, boxes in found.items():
        assert boxes == bare(megatron_boxes(spec, layout, rank, fused_norms=True))


@given(served())
@settings(deadline=None, max_examples=80)
def test_an_engine_holds_everything_with_its_replicas(model: tuple[ModelSpec, int, bool]) -> None:
    spec, tp, expert_parallel = model
    boxes = {rank: vllm_boxes(spec, tp, rank, 10 + rank, expert_parallel=expert_parallel) for rank in range(tp)}
    for name, counts in cover(spec.hf_shapes(), chain(*boxes.values())).items():
        replicated = ".k_proj." in name or ".v_proj." in name
        whole = "norm" in name or ".gate.weight" in name
        expected = tp if whole else max(tp // spec.num_kv_heads, 1) if replicated else 1
        assert (counts == expected).all(), name
    for rank, held in boxes.items():
        assert {box.rank for box in held} == {10 + rank}
        assert all(mask.all() for mask in assert_no_local_overlap(held).values())
        assert not any(box.param == "lm_head.weight" for box in held) or not spec.tied_embeddings
    shards = vllm_shards(spec, tp, 2, 10, expert_parallel=expert_parallel)
    assert [list(shard.ranks) for shard in shards] == [[10 + rank, 10 + rank + tp] for rank in range(tp)]
    assert [bare(shard.boxes) for shard in shards] == [bare(held) for held in boxes.values()]


def a_spec(**changes: Any) -> ModelSpec:
    fields: dict[str, Any] = {"family": "qwen2", "num_layers": 1, "hidden_size": 6, "num_heads": 4, "num_kv_heads": 2}
    fields |= {"head_dim": 3, "ffn_hidden_size": 8, "vocab_size": 70, "max_positions": 8, "norm_eps": 1e-6}
    return ModelSpec(**{**fields, "rope_theta": 1e4, "rope_scaling": None, "tied_embeddings": False, **changes})


def rows(boxes: list[Box], param: str) -> list[tuple[str, int, int, int]]:
    """Of one local parameter: (global tensor, its first row, number of rows, first local row)."""
    return [(b.name.split(".")[-2], b.offset[0], b.size[0], b.local_offset[0]) for b in boxes if b.param == param]


def test_vllm_stacks_all_queries_then_all_keys_then_all_values() -> None:
    name = "model.layers.0.self_attn.qkv_proj.weight"
    assert rows(vllm_boxes(a_spec(), 2, 1, 0), name) == [("q_proj", 6, 6, 0), ("k_proj", 3, 3, 6), ("v_proj", 3, 3, 9)]
    # four workers, two key/value heads: the third and the fourth both hold the second
    for worker in (2, 3):
        assert rows(vllm_boxes(a_spec(), 4, worker, 0), name) == [
            ("q_proj", 3 * worker, 3, 0),
            ("k_proj", 3, 3, 3),
            ("v_proj", 3, 3, 6),
        ]


def test_megatron_interleaves_by_group() -> None:
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    assert rows(megatron_boxes(a_spec(), Layout(), 0), name) == [
        ("q_proj", 0, 6, 0),
        ("k_proj", 0, 3, 6),
        ("v_proj", 0, 3, 9),
        ("q_proj", 6, 6, 12),
        ("k_proj", 3, 3, 18),
        ("v_proj", 3, 3, 21),
    ]


def test_more_megatron_ranks_than_groups_cut_groups() -> None:
    """[q q k v] of each of two groups, 12 rows, over four ranks of 6: half a group each, whatever the heads."""
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    assert [rows(megatron_boxes(a_spec(), Layout(tp=4), rank), name) for rank in range(4)] == [
        [("q_proj", 0, 6, 0)],
        [("k_proj", 0, 3, 0), ("v_proj", 0, 3, 3)],
        [("q_proj", 6, 6, 0)],
        [("k_proj", 3, 3, 0), ("v_proj", 3, 3, 3)],
    ]


def test_chunks_of_a_virtual_pipeline_are_models_of_their_own() -> None:
    """Eight layers over two stages in two rounds: the second stage holds layers 2, 3 and 6, 7."""
    spec, layout = a_spec(num_layers=8), Layout(pp=2, vpp=2)
    norms = {b.name: b.param for b in megatron_boxes(spec, layout, 1) if "norm" in b.name and "post" not in b.name}
    assert norms == {
        "model.layers.2.input_layernorm.weight": "model0.decoder.layers.0.input_layernorm.weight",
        "model.layers.3.input_layernorm.weight": "model0.decoder.layers.1.input_layernorm.weight",
        "model.layers.6.input_layernorm.weight": "model1.decoder.layers.0.input_layernorm.weight",
        "model.layers.7.input_layernorm.weight": "model1.decoder.layers.1.input_layernorm.weight",
        "model.norm.weight": "model1.decoder.final_layernorm.weight",
    }
    ends = [{b.param for b in megatron_boxes(spec, layout, rank) if "layers" not in b.param} for rank in range(2)]
    assert ends == [
        {"model0.embedding.word_embeddings.weight"},
        {"model1.decoder.final_layernorm.weight", "model1.output_layer.weight"},
    ]


def an_expert(boxes: list[Box], expert: int) -> list[tuple[str, Any, Any, str, Any]]:
    prefix = f"model.layers.0.block_sparse_moe.experts.{expert}."
    return [
        (b.name.removeprefix(prefix).split(".")[0], b.offset, b.size, b.param.split("experts.", 1)[1], b.local_offset)
        for b in boxes
        if b.name.startswith(prefix)
    ]


def test_experts_by_hand() -> None:
    """Four experts, eight wide, six deep; the third of them on every kind of rank that holds some of it."""
    spec = a_spec(family="mixtral", num_experts=4)
    w1, w3, w2 = ("w1", (0, 0), (8, 6)), ("w3", (0, 0), (8, 6)), ("w2", (0, 0), (6, 8))
    layout = Layout(tp=2, dp=2, ep=2, etp=2)  # ranks 2 and 3 hold the third and the fourth, half each
    assert an_expert(megatron_boxes(spec, layout, 1), 2) == []
    assert an_expert(megatron_boxes(spec, layout, 3), 2) == [
        ("w1", (4, 0), (4, 6), "local_experts.0.linear_fc1.weight", (0, 0)),
        ("w3", (4, 0), (4, 6), "local_experts.0.linear_fc1.weight", (4, 0)),
        ("w2", (0, 4), (6, 4), "local_experts.0.linear_fc2.weight", (0, 0)),
    ]
    grouped = megatron_boxes(spec, Layout(tp=2, dp=2, ep=2, etp=1), 3, fused_norms=True)  # Transformer Engine's names
    assert an_expert(grouped, 3) == [
        (*w1, "linear_fc1.weight1", (0, 0)),
        (*w3, "linear_fc1.weight1", (8, 0)),
        (*w2, "linear_fc2.weight1", (0, 0)),
    ]
    assert an_expert(vllm_boxes(spec, 2, 1, 0), 2) == [  # a half of every expert
        ("w1", (4, 0), (4, 6), "routed_experts.w13_weight", (2, 0, 0)),
        ("w3", (4, 0), (4, 6), "routed_experts.w13_weight", (2, 4, 0)),
        ("w2", (0, 4), (6, 4), "routed_experts.w2_weight", (2, 0, 0)),
    ]
    assert an_expert(vllm_boxes(spec, 2, 1, 0, expert_parallel=True), 2) == [  # all of half the experts
        (*w1, "routed_experts.w13_weight", (0, 0, 0)),
        (*w3, "routed_experts.w13_weight", (0, 8, 0)),
        (*w2, "routed_experts.w2_weight", (0, 0, 0)),
    ]


def test_vocabulary_padding_has_no_box() -> None:
    """70 rows over four ranks: Megatron makes 4 x 24 of them, vLLM 4 x 32."""
    megatron = [rows(megatron_boxes(a_spec(), Layout(tp=4), r), "output_layer.weight") for r in range(4)]
    assert megatron == [[("lm_head", 24 * r, n, 0)] if n else [] for r, n in enumerate([24, 24, 22, 0])]
    vllm = [rows(vllm_boxes(a_spec(), 4, r, 0), "lm_head.weight") for r in range(4)]
    assert vllm == [[("lm_head", 32 * r, n, 0)] if n else [] for r, n in enumerate([32, 32, 6, 0])]


def test_transformer_engine_names_the_fused_norms_otherwise() -> None:
    plain = {b.name: b.param for b in megatron_boxes(a_spec(), Layout(), 0)}
    fused = {b.name: b.param for b in megatron_boxes(a_spec(), Layout(), 0, fused_norms=True)}
    prefix = "decoder.layers.0."
    assert {name: fused[name] for name in fused if fused[name] != plain[name]} == {
        "model.layers.0.input_layernorm.weight": prefix + "self_attention.linear_qkv.layer_norm_weight",
        "model.layers.0.post_attention_layernorm.weight": prefix + "mlp.linear_fc1.layer_norm_weight",
    }


# --- against Megatron itself, on real ranks ---------------------------------------------------------------------------

Shard = tuple[str, str, tuple[int, ...], tuple[int, ...]]  # local parameter, Megatron's key, global offset, local shape


def on_a_rank(folder: str, layout: Layout, scalar_head: bool) -> tuple[list[Shard], dict[str, np.ndarray]]:
    """Megatron's description of this rank's shards, and the parameters as our loader filled them."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory

    from megappo.workers.megatron_role import MegatronRole
    from megappo.workers.settings import RoleSettings

    role = MegatronRole(RoleSettings(folder, layout, "float32", 100, scalar_head))
    metadata = {"non_homogeneous_layers": True, "dp_cp_group": role.groups.dp_cp}
    shards = []
    for name, entry in role.model.sharded_state_dict(metadata=metadata).items():
        built = entry.build() if isinstance(entry, ShardedTensorFactory) else entry
        for tensor in built.values() if isinstance(built, dict) else built if isinstance(built, list) else [built]:
            if not isinstance(tensor, ShardedObject):
                assert isinstance(tensor, ShardedTensor)
                shards.append((name, tensor.key, tuple(tensor.global_offset), tuple(tensor.local_shape)))
    return shards, {name: param.numpy() for name, param in role.params.items()}


def megatron_shard(box: Box, spec: ModelSpec) -> tuple[str, tuple[int, ...]]:
    """Megatron's global key and offset of a box of anything but query, key and value."""
    key = box.name.replace("model.layers.", "decoder.layers.").replace("model.norm.", "decoder.final_layernorm.")
    offset = box.offset
    for hf, megatron in {
        "model.embed_tokens.weight": "embedding.word_embeddings.weight",
        "lm_head.weight": "output_layer.weight",
        "score.weight": "output_layer.weight",
        "self_attn.o_proj": "self_attention.linear_proj",
        "self_attn.q_norm": "self_attention.q_layernorm",
        "self_attn.k_norm": "self_attention.k_layernorm",
        "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
        "post_attention_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
        "mlp.gate_proj": "mlp.linear_fc1",
        "mlp.down_proj": "mlp.linear_fc2",
    }.items():
        key = key.replace(hf, megatron)
    if "mlp.up_proj" in key:  # Megatron's global tensor is all gates, then all ups
        key, offset = key.replace("mlp.up_proj", "mlp.linear_fc1"), (offset[0] + spec.ffn_hidden_size, offset[1])
    return key, offset


def converted(hf: dict[str, torch.Tensor], name: str, spec: ModelSpec, layout: Layout, rank: int) -> torch.Tensor:
    """A local parameter by the usual conversion of whole tensors: reshape by group, concatenate, chunk."""
    at, tp, groups = layout.coordinates(rank), layout.tp, spec.num_kv_heads
    chunk, name = name.removeprefix("model").split(".", 1) if layout.vpp > 1 else ("0", name)
    parts = name.split(".")
    kind = ".".join(parts[3:]) if name.startswith("decoder.layers.") else name
    before = {(3, 2, 1): [0, 2], (4, 2, 1): [0, 2], (4, 2, 2): [0, 1], (4, 1, 1): [0], (1, 1, 1): [0]}
    first = before[spec.num_layers, layout.pp, layout.vpp][at["pp"]] + 2 * int(chunk)
    prefix = f"model.layers.{first + int(parts[2])}." if kind != name else ""

    def stacked(*names: str) -> list[torch.Tensor]:
        return [hf[prefix + n] for n in names]

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        extra = -len(tensor) % (8 * tp)
        return torch.cat([tensor, tensor.new_zeros(extra, tensor.shape[1])]).chunk(tp)[at["tp"]]

    if "linear_qkv" in kind:
        q, k, v = stacked(*(f"self_attn.{x}_proj.{parts[-1]}" for x in "qkv"))
        by_group = torch.cat([x.reshape(groups, -1, *x.shape[1:]) for x in (q, k, v)], dim=1)
        return by_group.reshape(-1, *q.shape[1:]).chunk(tp)[at["tp"]]
    if "linear_fc1" in kind:
        return torch.cat([x.chunk(tp)[at["tp"]] for x in stacked("mlp.gate_proj.weight", "mlp.up_proj.weight")])
    if "linear_fc2" in kind:
        return hf[prefix + "mlp.down_proj.weight"].chunk(tp, dim=1)[at["tp"]]
    if "linear_proj" in kind:
        return hf[prefix + "self_attn.o_proj.weight"].chunk(tp, dim=1)[at["tp"]]
    if kind == "output_layer.weight":
        if "score.weight" in hf:
            return hf["score.weight"]
        return padded(hf.get("lm_head.weight", hf["model.embed_tokens.weight"]))
    if kind == "embedding.word_embeddings.weight":
        return padded(hf["model.embed_tokens.weight"])
    names = {
        "input_layernorm.weight": "input_layernorm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
    }
    return hf[prefix + names[kind]]


def numbered_model(folder: Path, family: str, scalar_head: bool, **changes: Any) -> dict[str, torch.Tensor]:
    """A model whose weights are their own numbers; float32 holds these exactly."""
    tensors = load_file(make_model(folder, family, **changes) / "model.safetensors")
    if scalar_head:
        tensors["score.weight"] = torch.empty(1, tensors["model.norm.weight"].numel())
        tensors.pop("lm_head.weight", None)
    total = sum(tensor.numel() for tensor in tensors.values())
    assert total < 2**24
    numbers = torch.arange(1, 1 + total, dtype=torch.float32).split([tensor.numel() for tensor in tensors.values()])
    tensors = {name: n.view(tensor.shape).clone() for n, (name, tensor) in zip(numbers, tensors.items(), strict=True)}
    save_file(tensors, folder / "model.safetensors")
    return tensors


CASES: dict[str, tuple[str, Layout, bool, dict[str, Any]]] = {
    "qwen2, tied, two stages": ("qwen2", Layout(tp=2, pp=2), False, {"tie_word_embeddings": True, "vocab_size": 70}),
    "qwen3, uneven stages": ("qwen3", Layout(tp=2, pp=2), False, {"num_hidden_layers": 3, "vocab_size": 61}),
    "qwen2, tied, two chunks a stage": ("qwen2", Layout(pp=2, vpp=2), False, {"tie_word_embeddings": True}),
    "llama, scalar head": ("llama", Layout(tp=2, dp=2), True, {"num_hidden_layers": 1}),
    "qwen2, tied, one stage": ("qwen2", Layout(tp=2), False, {"tie_word_embeddings": True, "num_hidden_layers": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_boxes_equal_megatrons_shards_and_weights_land_right(tmp_path: Path, case: str) -> None:
    family, layout, scalar_head, changes = CASES[case]
    hf = numbered_model(tmp_path, family, scalar_head, **changes)
    spec = read_model_spec(tmp_path)
    for rank, (shards, params) in enumerate(run_ranks(layout.world, on_a_rank, str(tmp_path), layout, scalar_head)):
        boxes = megatron_boxes(spec, layout, rank, scalar_head=scalar_head)
        assert {box.param for box in boxes} == params.keys()
        ours: Counter[Any] = Counter()
        for box in boxes:
            if "linear_qkv" not in box.param:
                key, offset = megatron_shard(box, spec)
                if key in ("embedding.word_embeddings.weight", "output_layer.weight") and not scalar_head:
                    ours[box.param, key, offset] += 1  # their shards are as large as the padding makes them
                else:
                    ours[box.param, key, offset, box.size] += 1
        theirs: Counter[Any] = Counter()
        for param, key, offset, size in shards:
            if not param.endswith(("linear_qkv.weight", "linear_qkv.bias")):
                padded = key in ("embedding.word_embeddings.weight", "output_layer.weight") and not scalar_head
                theirs[(param, key, offset) if padded else (param, key, offset, size)] += 1
        assert ours == theirs
        for name, values in params.items():
            np.testing.assert_array_equal(values, converted(hf, name, spec, layout, rank).numpy(), err_msg=name)
