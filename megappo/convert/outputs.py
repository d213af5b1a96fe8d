"""What transformers computes from a Hugging Face folder against what Megatron computes from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from megappo.layout.mesh import Layout
from megappo.models.build import build_model
from megappo.models.process_groups import device, init_world, leave_world, make_process_groups
from megappo.models.spec import ModelSpec, read_model_spec
from megappo.reshard.gloo import host_store

from megatron.core import dist_checkpointing  # isort: skip (after megappo.models has prepared Megatron)
from megatron.core.packed_seq_params import PackedSeqParams  # isort: skip

TOKENS = 32

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Of the largest output: rounding in another order of operations stays well below."""


def largest_difference(folder: Path, checkpoint: Path, *, scalar_head: bool) -> tuple[float, float]:
    """Largest difference of logits (or values) on random tokens, as a fraction of the largest; and what is tolerable.

    Each side reads its weights with its own loader. float32 on CPU; on CUDA, Megatron's kernels want bfloat16.
    """
    spec = read_model_spec(folder)
    tokens_t = torch.randint(spec.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(0))
    theirs = _transformers_outputs(folder, tokens_t, scalar_head)
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    ours = _megatron_outputs(spec, checkpoint, tokens_t, scalar_head, dtype)
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-9)), TOLERANCE[dtype]


@torch.no_grad()
def _transformers_outputs(folder: Path, tokens_t: torch.Tensor, scalar_head: bool) -> torch.Tensor:
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()

    kind = AutoModelForTokenClassification if scalar_head else AutoModelForCausalLM
    more = {"num_labels": 1} if scalar_head else {}
    model = kind.from_pretrained(folder, dtype=torch.float32, **more).eval()
    return model(tokens_t[None]).logits[0].float()


@torch.no_grad()
def _megatron_outputs(
    spec: ModelSpec, checkpoint: Path, tokens_t: torch.Tensor, scalar_head: bool, dtype: torch.dtype
) -> torch.Tensor:
    store = host_store("127.0.0.1", 600)
    init_world(0, 1, "127.0.0.1", store.port, timeout_s=600)
    try:
        groups = make_process_groups(Layout(), 600)
        model = build_model(spec, Layout(), groups, dtype, scalar_head=scalar_head).eval()
        state = {"model": model.sharded_state_dict(metadata={"dp_cp_group": groups.dp_cp})}
        model.load_state_dict(dist_checkpointing.load(state, str(checkpoint))["model"])
        starts = torch.tensor([0, TOKENS], dtype=torch.int32, device=device())
        packed = PackedSeqParams("thd", starts, starts, max_seqlen_q=TOKENS, max_seqlen_kv=TOKENS)
        tokens_1t = tokens_t.to(device())[None]
        out = model(tokens_1t, torch.arange(TOKENS, device=device())[None], None, packed_seq_params=packed)
        if not scalar_head:
            out = (out @ model.head_weight.T)[:, : spec.vocab_size]
        return out.float().cpu()
    finally:
        leave_world()
