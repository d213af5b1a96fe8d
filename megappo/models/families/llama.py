"""Llama 2 and 3, and models of the same architecture (SmolLM2): no biases; Llama-3's rope scaling is known."""

from megappo.models.families.family import Family
from megappo.models.parameters import ATTENTION, GATED_MLP, NORMS

FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    layer=(*NORMS, *ATTENTION, *GATED_MLP),
    refused={"attention_bias": False, "mlp_bias": False},
)
