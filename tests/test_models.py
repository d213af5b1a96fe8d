"""Megatron's logits against transformers', for every family, at several layouts, on real ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import run_ranks
from tiny import LLAMA3_ROPE, make_model

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]
MODELS = {
    "qwen2": ("qwen2", {}),
    "qwen2-tied-padded": ("qwen2", {"tie_word_embeddings": True, "vocab_size": 61}),
    "qwen3": ("qwen3", {}),
    "llama": ("llama", {"vocab_size": 70}),
    "llama3-rope-uneven": ("llama", {"rope_parameters": LLAMA3_ROPE, "num_hidden_layers": 3}),
}
TOKENS = torch.randint(0, 61, (3, 40), generator=torch.Generator().manual_seed(3))


def megatron_logits(folder: str, tp: int, pp: int) -> np.ndarray | None:
    """Full logits of TOKENS, packed as three sequences, from the first tensor-parallel rank of the last stage."""
    import torch.distributed as dist
    from megatron.core.packed_seq_params import PackedSeqParams

    from megappo.layout.mesh import Layout
    from megappo.workers.megatron_role import MegatronRole
    from megappo.workers.settings import RoleSettings

    role = MegatronRole(RoleSettings(folder, Layout(tp=tp, pp=pp), "float32", 1000))
    rows, length = TOKENS.shape
    starts = torch.arange(0, rows * length + 1, length, dtype=torch.int32)
    packed = PackedSeqParams("thd", starts, starts, max_seqlen_q=length, max_seqlen_kv=length)
    ids, positions = TOKENS.reshape(1, -1), torch.arange(length).repeat(rows)[None]
    with torch.no_grad():
        if pp == 1:
            out = role.model(ids, positions, None, packed_seq_params=packed)
        else:
            hidden = torch.empty(rows * length, 1, role.spec.hidden_size)
            if role.is_last_stage:
                dist.recv(hidden, group=role.groups.pp, group_src=0)
                role.model.set_input_tensor(hidden)
            out = role.model(ids, positions, None, packed_seq_params=packed)
            if not role.is_last_stage:
                dist.send(out.contiguous(), group=role.groups.pp, group_dst=1)
                return None
    part = out @ role.head.weight_vh.T
    parts = [torch.empty_like(part) for _ in range(tp)]
    dist.all_gather(parts, part, group=role.groups.tp)
    return torch.cat(parts, -1)[:, : role.spec.vocab_size].reshape(rows, length, -1).numpy()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, np.ndarray]]:
    from transformers import AutoModelForCausalLM

    out = {}
    for name, (family, changes) in MODELS.items():
        folder = make_model(tmp_path_factory.mktemp(name), family, **changes)
        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(TOKENS).logits
        out[name] = folder, logits.numpy()
    return out


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
def test_logits_equal_transformers(models: dict[str, tuple[Path, np.ndarray]], name: str, tp: int, pp: int) -> None:
    folder, expected = models[name]
    results = [r for r in run_ranks(tp * pp, megatron_logits, str(folder), tp, pp) if r is not None]
    assert len(results) == tp
    assert expected.std() > 0.3  # the model says something
    for logits in results:
        np.testing.assert_allclose(logits, expected, atol=1e-5)
