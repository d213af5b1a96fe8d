"""Mixtral: attention as in Llama, experts in every layer."""

from megappo.models.families.family import Family
from megappo.models.parameters import ATTENTION, INPUT_NORM, mixture

FAMILY = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    layer=(INPUT_NORM, *ATTENTION, *mixture("block_sparse_moe", "w1", "w3", "w2")),
    refused={"sliding_window": None},
    experts=("num_local_experts",),
)
