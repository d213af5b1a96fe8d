"""Qwen2 and Qwen2.5: biases on the query, key and value projections."""

from megappo.models.families.family import Family
from megappo.models.parameters import ATTENTION, GATED_MLP, NORMS, QKV_BIAS

FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    layer=(*NORMS, *ATTENTION, *QKV_BIAS, *GATED_MLP),
    refused={"use_sliding_window": False},
)
