"""From a model's shape and a layout to this rank's part of a Megatron GPT, with a language-model or a scalar head."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from megappo.layout.mesh import Layout, held_layers
from megappo.models import megatron_cpu
from megappo.models.adapters import add_adapters
from megappo.models.layers import block_spec
from megappo.models.parameters import megatron_vocabulary
from megappo.models.process_groups import ProcessGroupCollection, device
from megappo.models.spec import Llama3RopeScaling, ModelSpec

megatron_cpu.install()

from megatron.core import tensor_parallel  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

RECOMPUTE: Mapping[str, dict[str, Any]] = {
    "none": {},
    # Attention is fused and keeps little; what a layer keeps is mostly the MLP's wide activations.
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
FP8: Mapping[str, dict[str, Any]] = {
    "none": {},
    # Scales come from the tensor at hand, not from earlier steps: scoring and training then compute the same.
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
}
"""Megatron's settings for each choice of ``recompute`` and ``fp8``; weights stay in the model's dtype."""


def transformer_config(
    spec: ModelSpec, layout: Layout, dtype: torch.dtype, *, recompute: str = "none", fp8: str = "none"
) -> TransformerConfig:
    """Megatron's configuration of this model at this layout."""
    on_cuda = torch.cuda.is_available()
    stages = held_layers(spec.num_layers, layout.pp, layout.vpp)
    uneven, interleaved = len(set(stages)) > 1, layout.vpp > 1
    return TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        ffn_hidden_size=spec.ffn_hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        qk_layernorm=spec.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if interleaved else None,
        num_layers_in_first_pipeline_stage=stages[0] if uneven else None,
        num_layers_in_last_pipeline_stage=stages[-1] if uneven else None,
        sequence_parallel=layout.sequence_parallel and layout.tp > 1,
        variable_seq_lengths=True,  # micro-batches are cut by a token budget, so their lengths differ
        moe_token_dispatcher_type="alltoall",  # the default is refused with variable lengths, even without experts
        calculate_per_token_loss=True,  # gradients are summed, never averaged: our weights already hold the divisor
        # Megatron marks weights as split while it initialises them, and gradient norms need the marks; the values
        # themselves are loaded later, so nothing is drawn.
        perform_initialization=True,
        init_method=_leave,
        output_layer_init_method=_leave,
        use_cpu_initialization=not on_cuda,
        bias_activation_fusion=on_cuda,
        bias_dropout_fusion=on_cuda,
        apply_rope_fusion=on_cuda,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=on_cuda,
        cross_entropy_loss_fusion=False,
        # With chunks, neighbours exchange both ways at once: in one batch, two stages would take each other's
        # activations for gradients; apart, a send may still be reading an output when it would be deallocated.
        batch_p2p_comm=not interleaved,
        overlap_p2p_comm=interleaved,
        deallocate_pipeline_outputs=not interleaved,
        **RECOMPUTE[recompute],
        **FP8[fp8],
    )


def _leave(weight: torch.Tensor) -> None:
    """Initialise nothing."""


def build_model(
    spec: ModelSpec,
    layout: Layout,
    groups: ProcessGroupCollection,
    dtype: torch.dtype,
    *,
    scalar_head: bool = False,
    recompute: str = "none",
    fp8: str = "none",
) -> PolicyModel | ModelChunks:
    """Build this rank's part of the model, on its device; the weights are uninitialised.

    Its parameters have the names that :func:`megappo.reshard.boxes.megatron_boxes` gives them.

    Args:
        spec: the model.
        layout: the role's parallel sizes.
        groups: the role's process groups.
        dtype: of parameters and activations.
        scalar_head: replace the language-model head by one number a token (critic, reward model).
        recompute, fp8: see :data:`RECOMPUTE` and :data:`FP8`.
    """
    config = transformer_config(spec, layout, dtype, recompute=recompute, fp8=fp8)
    # Transformer Engine's layers fuse gradient accumulation themselves. Megatron's own head layer would ask for Apex,
    # though it is never called: LanguageHead takes its weight.
    tensor_parallel.layers._grad_accum_fusion_available = True
    if layout.vpp == 1:
        return _build(spec, layout, groups, config, scalar_head).to(device())
    return ModelChunks([_build(spec, layout, groups, config, scalar_head, chunk) for chunk in range(layout.vpp)]).to(
        device()
    )


def _build(
    spec: ModelSpec,
    layout: Layout,
    groups: ProcessGroupCollection,
    config: TransformerConfig,
    scalar_head: bool,
    chunk: int | None = None,
) -> PolicyModel:
    """This rank's part of the model, or a chunk of it under a virtual pipeline."""
    first = groups.pp.rank() == 0 and chunk in (None, 0)
    last = groups.pp.rank() == groups.pp.size() - 1 and chunk in (None, layout.vpp - 1)
    model = PolicyModel(
        config=config,
        transformer_layer_spec=block_spec(config, groups.pp.rank(), chunk),
        vocab_size=megatron_vocabulary(spec.vocab_size, layout.tp),
        max_sequence_length=spec.max_positions,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=spec.tied_embeddings and not scalar_head,
        position_embedding_type="rope",
        rotary_base=spec.rope_theta,
        pg_collection=groups,
        vp_stage=chunk,
    )
    if spec.rope_scaling:
        model.rotary_pos_emb.inv_freq = llama3_inverse_frequencies(model.rotary_pos_emb.inv_freq, spec.rope_scaling)
    if scalar_head and last:
        model.output_layer = ScalarHead(config, groups)
    if spec.lora is not None:
        add_adapters(model, spec, groups.tp)
    return model


class PolicyModel(GPTModel):
    """Megatron's GPT, which ends before its head: the last stage gives hidden states, or a scalar head's values.

    :class:`~megappo.models.language_head.LanguageHead` goes on from the hidden states, with :attr:`head_weight`.
    """

    @property
    def head_weight(self) -> torch.nn.Parameter:
        """Weight of the language-model head, [padded vocabulary / tp, hidden]; on the last stage only."""
        shared = self.share_embeddings_and_output_weights
        return self.shared_embedding_or_output_weight() if shared else self.output_layer.weight

    def _postprocess(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """[sequence, 1, hidden] between stages; at the end [tokens, hidden], or [tokens, 1] of a scalar head."""
        if not self.post_process:
            return hidden_states
        if isinstance(self.output_layer, ScalarHead):
            return self.output_layer(hidden_states)[:, 0]
        # Each rank's slice of the vocabulary gives a part of the hidden states' gradient: these sum them.
        if self.config.sequence_parallel:
            return tensor_parallel.gather_from_sequence_parallel_region(hidden_states, group=self.pg_collection.tp)[
                :, 0
            ]
        return tensor_parallel.copy_to_tensor_model_parallel_region(hidden_states, group=self.pg_collection.tp)[:, 0]

    def tie_embeddings_and_output_weights_state_dict(
        self, sharded_state_dict: dict[str, Any], output_key: str, embedding_key: str, metadata: dict[str, Any]
    ) -> None:
        """The checkpoint entry of a tied head; Megatron's own version asks its globals for a rank."""
        if self.post_process and not self.pre_process:
            head = sharded_state_dict[output_key]  # a copy of the first stage's embedding, which alone is written
            head.key, head.replica_id = embedding_key, (1, 0, metadata["dp_cp_group"].rank())
            head.allow_shape_mismatch = True  # the vocabulary's padding depends on the tensor-parallel size


class ModelChunks(torch.nn.Module):
    """What a pipeline stage holds under a virtual pipeline: parts of the model that lie apart, as ``model0`` and on."""

    def __init__(self, chunks: Sequence[PolicyModel]) -> None:
        super().__init__()
        for number, chunk in enumerate(chunks):
            self.add_module(f"model{number}", chunk)

    def sharded_state_dict(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Checkpoint entries of all chunks, by parameter."""
        return {
            f"model{number}.{key}": entry
            for number, chunk in enumerate(chunks_of(self))
            for key, entry in chunk.sharded_state_dict(metadata=metadata).items()
        }


def chunks_of(model: PolicyModel | ModelChunks) -> list[PolicyModel]:
    """The chunks of a stage, which is one where there is no virtual pipeline."""
    return list(model.children()) if isinstance(model, ModelChunks) else [model]  # type: ignore[arg-type]


class ScalarHead(MegatronModule):
    """One number a token from its hidden state, held whole by every tensor-parallel rank."""

    def __init__(self, config: TransformerConfig, groups: ProcessGroupCollection) -> None:
        super().__init__(config)
        self.tp_group = groups.tp
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        # Under sequence parallelism each rank sees only its tokens: Megatron then sums the weight's gradients.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_sbh: torch.Tensor) -> torch.Tensor:
        """[sequence, batch, 1] in float32, of the whole sequence."""
        values_sb1 = F.linear(hidden_sbh, self.weight).float()
        if self.config.sequence_parallel:
            values_sb1 = tensor_parallel.gather_from_sequence_parallel_region(
                values_sb1, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return values_sb1


def llama3_inverse_frequencies(inv_freq: torch.Tensor, scaling: Llama3RopeScaling) -> torch.Tensor:
    """Llama 3.1's rotary scaling: long wavelengths are stretched by ``factor``, short ones kept, those between blended.

    Megatron has the same formula but fixes three of its four constants.

    Args:
        inv_freq: float32 [head_dim / 2].
    """
    wavelength = 2 * math.pi / inv_freq
    longest = scaling.original_max_positions / scaling.low_freq_factor
    shortest = scaling.original_max_positions / scaling.high_freq_factor
    blend = (scaling.original_max_positions / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smoothed = (1 - blend) * inv_freq / scaling.factor + blend * inv_freq
    out = torch.where(wavelength > longest, inv_freq / scaling.factor, inv_freq)
    return torch.where((wavelength <= longest) & (wavelength >= shortest), smoothed, out)
