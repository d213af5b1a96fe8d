"""The transformer layer that Megatron builds: Transformer Engine's on CUDA, plain torch modules on CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from megappo.models import megatron_cpu

megatron_cpu.install()

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402
from megatron.core.transformer.transformer_block import (  # noqa: E402
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402


def block_spec(config: TransformerConfig, pp_rank: int, chunk: int | None = None) -> TransformerBlockSubmodules:
    """The layers of one pipeline stage, or of a chunk of it under a virtual pipeline."""
    layer, final_norm = _transformer_engine_layer(config) if torch.cuda.is_available() else _torch_layer(config)
    count = get_num_layers_to_build(config, vp_stage=chunk, pp_rank=pp_rank)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=final_norm)


def _transformer_engine_layer(config: TransformerConfig) -> tuple[Any, Any]:
    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm), TENorm


def _torch_layer(config: TransformerConfig) -> tuple[Any, Any]:
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    parts.self_attention.submodules.core_attention = PackedAttention
    if config.qk_layernorm:
        parts.self_attention.submodules.q_layernorm = parts.self_attention.submodules.k_layernorm = RMSNorm
    return layer, RMSNorm


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm (arXiv:1910.07467, eq. 4), computed in float32.

    Megatron's own torch norm refuses sequence parallelism; this one marks its weight so that Megatron sums the
    weight's gradients over the tensor-parallel group.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


class PackedAttention(MegatronModule):
    """Causal attention over packed sequences (``thd``) on torch's scaled dot product attention."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        self.tp_group = pg_collection.tp  # read by sharded_state_dict, which else falls back to Megatron's globals

    def forward(
        self,
        query_thd: torch.Tensor,
        key_thd: torch.Tensor,
        value_thd: torch.Tensor,
        attention_mask: None = None,
        attn_mask_type: Any = None,
        attention_bias: None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Attend within each sequence.

        Args:
            query_thd, key_thd, value_thd: [tokens, heads, head_dim]; fewer key/value heads are shared among queries.
            packed_seq_params: where each sequence begins.

        Returns:
            [tokens, 1, heads * head_dim].
        """
        if packed_seq_params is None:
            raise ValueError("PackedAttention needs packed sequences: packed_seq_params is None")
        starts = packed_seq_params.cu_seqlens_q.long()
        lengths, longest = starts.diff(), int(packed_seq_params.max_seqlen_q)
        # Sequences are laid out with padding at their end: a causal mask alone keeps real queries off padding keys.
        sequence = torch.repeat_interleave(torch.arange(len(lengths), device=starts.device), lengths)
        token = torch.arange(query_thd.shape[0], device=starts.device)
        place = sequence * longest + (token - starts[sequence])

        def padded(x_thd: torch.Tensor) -> torch.Tensor:
            flat = x_thd.new_zeros(len(lengths) * longest, *x_thd.shape[1:]).index_copy(0, place, x_thd)
            return flat.view(len(lengths), longest, *x_thd.shape[1:]).transpose(1, 2)

        out_bhsd = F.scaled_dot_product_attention(
            padded(query_thd),
            padded(key_thd),
            padded(value_thd),
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=query_thd.shape[1] != key_thd.shape[1],
        )
        out_td = out_bhsd.transpose(1, 2).reshape(len(lengths) * longest, -1).index_select(0, place)
        return out_td.unsqueeze(1)
