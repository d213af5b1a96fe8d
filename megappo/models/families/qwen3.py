"""Qwen3 (dense): RMS norms on each query and key head, a head size of its own."""

from megappo.models.families.family import Family
from megappo.models.parameters import ATTENTION, GATED_MLP, NORMS, QK_NORM

FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    layer=(*NORMS, *ATTENTION, *QK_NORM, *GATED_MLP),
    refused={"use_sliding_window": False, "attention_bias": False},
    defaults={"head_dim": 128},
)
