"""The name-and-shape table: one parameter's name in Hugging Face, Megatron and vLLM, and how each splits it.

This is the only place that knows how the three systems lay out a weight. Checkpoints, weight sync and conversion all
read it, so a family is supported everywhere as soon as its table is right. Pure Python: no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Split(Enum):
    """How tensor parallelism cuts a parameter (Megatron and vLLM agree on the axis, not on the order inside)."""

    WHOLE = "whole"  # every rank holds all of it
    ROWS = "rows"  # axis 0
    COLUMNS = "columns"  # axis 1
    QKV = "qkv"  # q, k and v fused: Megatron interleaves them by key/value group, vLLM stacks all q, all k, all v
    GATE_UP = "gate_up"  # gate and up fused: each rank stacks its part of both
    KEY_VALUES = "key_values"  # axis 0, by key/value head: where vLLM has more workers than heads, they hold copies
    VOCABULARY = "vocabulary"  # axis 0, padded at the end by each system in its own way


EXPERT = "{expert}"
"""In a name: where the number of the expert goes."""


def megatron_vocabulary(vocab_size: int, tp: int) -> int:
    """Rows of Megatron's padded vocabulary over all ranks: each holds a multiple of 8, which bfloat16 kernels want."""
    return -(-vocab_size // (8 * tp)) * 8 * tp


def vllm_vocabulary(vocab_size: int) -> int:
    """Rows of vLLM's padded vocabulary over all ranks: a multiple of 64, whatever the tensor-parallel size."""
    return -(-vocab_size // 64) * 64


@dataclass(frozen=True)
class Parameter:
    """One local parameter of a layer (or of the model) under its three names.

    With :data:`EXPERT` in its Hugging Face names it stands for one such parameter per expert. A local name that has it
    too stands for a parameter per expert held (counted from 0 on each rank); one that lacks it is a single parameter
    with the experts held as its leading axis.

    Attributes:
        hf: Hugging Face names; more than one where Megatron and vLLM fuse them.
        shapes: shape of each ``hf`` tensor, as keys of :meth:`megappo.models.spec.ModelSpec.dims`.
        megatron: name in Megatron's own layers.
        megatron_te: name in Transformer Engine's fused layers, where it differs.
        vllm: name in vLLM.
        split: how it is cut by tensor parallelism.
    """

    hf: tuple[str, ...]
    shapes: tuple[tuple[str, ...], ...]
    megatron: str
    vllm: str
    split: Split
    megatron_te: str | None = None

    @property
    def per_expert(self) -> bool:
        """Whether there is one for each expert."""
        return EXPERT in self.hf[0]


INPUT_NORM = Parameter(
    ("input_layernorm.weight",),
    (("hidden",),),
    "input_layernorm.weight",
    "input_layernorm.weight",
    Split.WHOLE,
    "self_attention.linear_qkv.layer_norm_weight",
)

NORMS = (
    INPUT_NORM,
    Parameter(
        ("post_attention_layernorm.weight",),
        (("hidden",),),
        "pre_mlp_layernorm.weight",
        "post_attention_layernorm.weight",
        Split.WHOLE,
        "mlp.linear_fc1.layer_norm_weight",
    ),
)

ATTENTION = (
    Parameter(
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        (("q", "hidden"), ("kv", "hidden"), ("kv", "hidden")),
        "self_attention.linear_qkv.weight",
        "self_attn.qkv_proj.weight",
        Split.QKV,
    ),
    Parameter(
        ("self_attn.o_proj.weight",),
        (("hidden", "q"),),
        "self_attention.linear_proj.weight",
        "self_attn.o_proj.weight",
        Split.COLUMNS,
    ),
)

QKV_BIAS = (
    Parameter(
        ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        (("q",), ("kv",), ("kv",)),
        "self_attention.linear_qkv.bias",
        "self_attn.qkv_proj.bias",
        Split.QKV,
    ),
)

QK_NORM = (
    Parameter(
        ("self_attn.q_norm.weight",),
        (("head_dim",),),
        "self_attention.q_layernorm.weight",
        "self_attn.q_norm.weight",
        Split.WHOLE,
    ),
    Parameter(
        ("self_attn.k_norm.weight",),
        (("head_dim",),),
        "self_attention.k_layernorm.weight",
        "self_attn.k_norm.weight",
        Split.WHOLE,
    ),
)

GATED_MLP = (
    Parameter(
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        (("ffn", "hidden"), ("ffn", "hidden")),
        "mlp.linear_fc1.weight",
        "mlp.gate_up_proj.weight",
        Split.GATE_UP,
    ),
    Parameter(
        ("mlp.down_proj.weight",),
        (("hidden", "ffn"),),
        "mlp.linear_fc2.weight",
        "mlp.down_proj.weight",
        Split.COLUMNS,
    ),
)


def mixture(block: str, gate: str, up: str, down: str) -> tuple[Parameter, ...]:
    """The second half of a layer whose MLP is a mixture of experts: its norm, the router and the experts.

    The router reads the norm's output, so Transformer Engine does not fuse the norm into a projection here.

    Args:
        block: Hugging Face and vLLM name of the block.
        gate, up, down: Hugging Face names of an expert's projections.
    """
    expert = f"{block}.experts.{EXPERT}."
    return (
        Parameter(
            ("post_attention_layernorm.weight",),
            (("hidden",),),
            "pre_mlp_layernorm.weight",
            "post_attention_layernorm.weight",
            Split.WHOLE,
        ),
        Parameter(
            (f"{block}.gate.weight",),
            (("experts", "hidden"),),
            "mlp.router.weight",
            f"{block}.gate.weight",
            Split.WHOLE,
        ),
        Parameter(
            (f"{expert}{gate}.weight", f"{expert}{up}.weight"),
            (("ffn", "hidden"), ("ffn", "hidden")),
            f"mlp.experts.local_experts.{EXPERT}.linear_fc1.weight",
            f"{block}.experts.routed_experts.w13_weight",
            Split.GATE_UP,
            f"mlp.experts.linear_fc1.weight{EXPERT}",
        ),
        Parameter(
            (f"{expert}{down}.weight",),
            (("hidden", "ffn"),),
            f"mlp.experts.local_experts.{EXPERT}.linear_fc2.weight",
            f"{block}.experts.routed_experts.w2_weight",
            Split.COLUMNS,
            f"mlp.experts.linear_fc2.weight{EXPERT}",
        ),
    )


EMBEDDING = Parameter(
    ("model.embed_tokens.weight",),
    (("vocab", "hidden"),),
    "embedding.word_embeddings.weight",
    "model.embed_tokens.weight",
    Split.VOCABULARY,
)
FINAL_NORM = Parameter(
    ("model.norm.weight",), (("hidden",),), "decoder.final_layernorm.weight", "model.norm.weight", Split.WHOLE
)
LM_HEAD = Parameter(
    ("lm_head.weight",), (("vocab", "hidden"),), "output_layer.weight", "lm_head.weight", Split.VOCABULARY
)
SCALAR_HEAD = Parameter(("score.weight",), (("one", "hidden"),), "output_layer.weight", "score.weight", Split.WHOLE)
