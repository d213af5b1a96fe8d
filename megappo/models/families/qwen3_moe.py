"""Qwen3 mixtures of experts: attention as in Qwen3, experts in every layer, none of them shared by all tokens."""

from megappo.models.families.family import Family
from megappo.models.parameters import ATTENTION, INPUT_NORM, QK_NORM, mixture

FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    layer=(INPUT_NORM, *ATTENTION, *QK_NORM, *mixture("mlp", "gate_proj", "up_proj", "down_proj")),
    refused={"use_sliding_window": False, "attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    defaults={"head_dim": 128},
    experts=("num_experts", "num_local_experts"),  # before transformers 5, and since
    ffn="moe_intermediate_size",
)
