"""Mixtures of experts converted both ways, and held against a real mixture that Megatron itself builds."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from test_convert import VOCABULARY, assert_same_weights, make, problems, run, weights

from megappo.convert.to_megatron import ToMegatron
from megappo.formats.torch_dist import read_chunks
from megappo.layout.mesh import Layout

EXPERT = {
    "qwen3_moe": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj"),
    "mixtral": ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3", "block_sparse_moe.experts.{}.w2"),
}
ROUTER = {"qwen3_moe": "mlp.gate", "mixtral": "block_sparse_moe.gate"}


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize(
    "options", [{"tp": 2, "pp": 2}, {"pp": 2, "vpp": 2, "ep": 4}, {"tp": 2, "ep": 2, "etp": 1}], ids=str
)
def test_there_and_back_is_byte_exact(tmp_path: Path, family: str, options: dict[str, int]) -> None:
    folder = make(tmp_path / "model", family, num_hidden_layers=4)
    run(folder, tmp_path / "checkpoint", processes=2, bucket_mb=1, **options)
    run(tmp_path / "checkpoint", tmp_path / "back", processes=2)
    for name in ("model.safetensors", "config.json"):
        assert (folder / name).read_bytes() == (tmp_path / "back" / name).read_bytes()


def test_experts_are_in_the_files_of_the_ranks_that_hold_them(tmp_path: Path) -> None:
    """Tensor parallel 2, whole experts over 4 ranks: a stage has 4 ranks, of which two hold no dense weights first."""
    folder = make(tmp_path / "model", "qwen3_moe")
    work = ToMegatron(folder, None, Layout(tp=2, dp=2, pp=2, ep=4, etp=1), 2**20)
    held = {(int(part.file.split("_")[2]), part.tensor.layer, part.tensor.expert) for part in work.parts}
    experts = {place for place in held if place[2] is not None}
    assert experts == {(4 * layer + expert, layer, expert) for layer in range(2) for expert in range(4)}
    assert {rank for rank, _, expert in held if expert is None} == {0, 1, 4, 5}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("layers", "experts", "apart"), [(2, 12, True), (12, 2, False)], ids=["apart", "stacked"])
def test_many_layers_or_experts_in_a_chunk(tmp_path: Path, layers: int, experts: int, apart: bool) -> None:
    """As torch itself writes what Megatron names layer by layer, with all of a layer's experts in one tensor; or all.

    More than ten, of which a Hugging Face file has the eleventh before the third.
    """
    import torch.distributed.checkpoint as dcp

    folder = make(tmp_path / "model", "mixtral", num_hidden_layers=layers, num_local_experts=experts)
    run(folder, tmp_path / "checkpoint", tp=2, ep=2)
    shapes, _ = read_chunks(tmp_path / "checkpoint")
    assert shapes["decoder.layers.mlp.experts.experts.linear_fc1.weight"] == (layers, experts, 192, 64)
    saved: dict[str, torch.Tensor] = {key: torch.empty(shape, dtype=torch.bfloat16) for key, shape in shapes.items()}
    dcp.load(saved, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    for key in [key for key in saved if key.startswith("decoder.layers.")] if apart else []:
        tensor = saved.pop(key)
        saved |= {key.replace("layers.", f"layers.{i}.", 1): layer.clone() for i, layer in enumerate(tensor)}
    dcp.save(saved, checkpoint_id=tmp_path / "saved", no_dist=True)
    run(tmp_path / "saved", tmp_path / "back", model=str(folder))
    assert_same_weights(folder, tmp_path / "back")


def test_every_problem_of_a_mixture_at_once(tmp_path: Path) -> None:
    folder = make(tmp_path / "model", "qwen3_moe")
    assert "all 45 tensors are equal, element by element (mixtures" in run(folder, tmp_path / "good", verify=True)[-1]
    other = make(tmp_path / "other", "qwen3_moe", num_experts=8)
    text = problems(tmp_path / "good", tmp_path / "back", model=str(other))
    for name, ours, theirs in (
        ("router", "[2, 4, 64]", "[2, 8, 64]"),
        ("experts.experts.linear_fc1", "[2, 4, 48, 64]", "[2, 8, 48, 64]"),
        ("experts.experts.linear_fc2", "[2, 4, 64, 24]", "[2, 8, 64, 24]"),
    ):
        assert f"tensor decoder.layers.mlp.{name}.weight has shape {ours}, {other}/config.json says {theirs}" in text
    tensors = load_file(folder / "model.safetensors")
    prefix = "model.layers.1.mlp"
    del tensors[f"{prefix}.experts.3.up_proj.weight"]
    tensors[f"{prefix}.experts.4.up_proj.weight"] = torch.zeros(24, 64)
    tensors[f"{prefix}.gate.weight"] = torch.zeros(5, 64)
    save_file(tensors, folder / "model.safetensors")
    text = problems(folder, tmp_path / "checkpoint")
    assert f"tensor {prefix}.experts.3.up_proj.weight [24, 64] is missing" in text
    assert f"tensor {prefix}.experts.4.up_proj.weight is not part of this family" in text
    assert f"tensor {prefix}.gate.weight has shape [5, 64], config.json says [4, 64]" in text


def test_experts_of_several_dtypes_need_one(tmp_path: Path) -> None:
    """All experts of all layers are one tensor of a checkpoint."""
    folder = make(tmp_path / "model", "mixtral")
    tensors = load_file(folder / "model.safetensors")
    wide = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    tensors[wide] = tensors[wide].float()
    save_file(tensors, folder / "model.safetensors")
    first = "model.layers.0.block_sparse_moe.experts.0.w2.weight"
    text = f"{first}, {wide} are parts of one tensor in Megatron but differ in dtype: give --dtype"
    assert text in problems(folder, tmp_path / "checkpoint")
    run(folder, tmp_path / "checkpoint", dtype="bfloat16")


def expert_groups(groups: Any, layout: Layout) -> None:
    """Megatron's groups of experts in place of those of a dense model. Collective."""
    import torch.distributed as dist

    grid = torch.arange(layout.world).view(layout.pp, -1, layout.ep, layout.expert_tp)
    for name, axis in (("ep", 2), ("expt_tp", 3), ("expt_dp", 1)):
        for ranks in grid.movedim(axis, -1).reshape(-1, grid.shape[axis]).tolist():
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                setattr(groups, name, group)
    for ranks in grid.flatten(2).flatten(0, 1).tolist():
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            groups.tp_ep = groups.tp_ep_pp = group
    groups.intra_expt_dp = groups.expt_dp


def load_and_save(checkpoint: str, folder: str, layout: Layout, saved: str) -> tuple[dict[str, Any], Any]:
    """Megatron builds a mixture, reads a checkpoint and writes its own; its parameters, and logits of this rank.

    As numpy arrays: a tensor would be shared, and gone with this process.
    """
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined] (Megatron forks)
    from megappo.models import build, layers
    from megappo.models.process_groups import make_process_groups
    from megappo.models.spec import read_model_spec
    from megappo.workers.role_checkpoint import load, save

    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # isort: skip
    from megatron.core.packed_seq_params import PackedSeqParams  # isort: skip
    from megatron.core.transformer.moe import moe_utils  # isort: skip

    moe_utils.te_general_gemm = None  # which Megatron forgets where there is no Transformer Engine
    spec = read_model_spec(folder)
    groups = make_process_groups(layout, 60)
    expert_groups(groups, layout)
    config = replace(
        build.transformer_config(spec, layout, torch.float32),
        num_moe_experts=spec.num_experts,
        moe_ffn_hidden_size=spec.ffn_hidden_size,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",  # the other one wants CUDA
        variable_seq_lengths=False,
        moe_router_topk=2,
    )
    layer = get_gpt_layer_local_spec(num_experts=spec.num_experts, qk_layernorm=spec.qk_norm, normalization="RMSNorm")
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = layers.RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = layers.PackedAttention
    if spec.qk_norm:
        attention.q_layernorm = attention.k_layernorm = layers.RMSNorm
    # Transformer Engine's layers keep this norm apart in a mixture; only these rename it in checkpoints.
    del parts.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    model = build.PolicyModel(
        config=config,
        transformer_layer_spec=layers.TransformerBlockSubmodules([layer] * spec.num_layers, layer_norm=layers.RMSNorm),
        vocab_size=build.megatron_vocabulary(spec.vocab_size, layout.tp),
        max_sequence_length=spec.max_positions,
        position_embedding_type="rope",
        rotary_base=spec.rope_theta,
        pg_collection=groups,
        share_embeddings_and_output_weights=False,
    ).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(float("nan"))
    load(checkpoint, model, None, groups.dp_cp)
    save(saved, model, None, groups.dp_cp)
    count = len(TOKENS)
    starts = torch.tensor([0, count], dtype=torch.int32)
    packed = PackedSeqParams("thd", starts, starts, max_seqlen_q=count, max_seqlen_kv=count)
    with torch.no_grad():
        hidden = model(torch.tensor([TOKENS]), torch.arange(count)[None], None, packed_seq_params=packed)
        logits = hidden @ model.head_weight.T
    return {name: param.detach().numpy() for name, param in model.named_parameters()}, logits.numpy()


TOKENS = [(7 * i * i + 3) % VOCABULARY for i in range(40)]


@pytest.mark.parametrize(
    ("family", "changes", "layout"),
    [
        ("qwen3_moe", {"norm_topk_prob": True}, Layout(dp=2, ep=2)),
        ("mixtral", {}, Layout(tp=2)),
    ],
    ids=["whole experts", "experts in parts"],
)
def test_megatron_and_transformers_compute_the_same(
    tmp_path: Path, family: str, changes: dict[str, Any], layout: Layout
) -> None:
    """HF -> checkpoint -> Megatron's own mixture -> its checkpoint -> HF, with every expert where it belongs."""
    import transformers

    folder = make(tmp_path / "model", family, **changes)
    run(folder, tmp_path / "checkpoint", ep=4, etp=1)
    saved = tmp_path / "saved"
    ranks = run_ranks(layout.world, load_and_save, str(tmp_path / "checkpoint"), str(folder), layout, str(saved))
    source = {name: tensor.float() for name, tensor in weights(folder).items()}
    gate, up, down = EXPERT[family]
    for rank, (arrays, _) in enumerate(ranks):
        params = {name: torch.from_numpy(array) for name, array in arrays.items()}
        assert not any(param.isnan().any() for param in params.values())
        at, of, held = (rank, 2, range(4)) if layout.tp == 2 else (0, 1, range(2 * rank, 2 * rank + 2))
        for layer in range(2):
            theirs, ours = f"model.layers.{layer}.", f"decoder.layers.{layer}.mlp."
            assert torch.equal(params[f"{ours}router.weight"], source[f"{theirs}{ROUTER[family]}.weight"])
            for local, expert in enumerate(held):
                fc1 = [source[f"{theirs}{name.format(expert)}.weight"].chunk(of)[at] for name in (gate, up)]
                fc2 = source[f"{theirs}{down.format(expert)}.weight"].chunk(of, 1)[at]
                prefix = f"{ours}experts.local_experts.{local}."
                assert torch.equal(params[f"{prefix}linear_fc1.weight"], torch.cat(fc1))
                assert torch.equal(params[f"{prefix}linear_fc2.weight"], fc2)
    run(saved, tmp_path / "back", model=str(folder), dtype="bfloat16")
    assert_same_weights(folder, tmp_path / "back")
    parts = [torch.from_numpy(part) for _, part in ranks]
    logits = torch.cat(parts, 1) if layout.tp == 2 else parts[1]
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32)
    with torch.no_grad():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits[:, :VOCABULARY], expected, rtol=0, atol=2e-4)
