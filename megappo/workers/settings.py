"""What the driver tells workers. Apart from the workers, since the driver imports neither Megatron nor vLLM."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megappo.config import LoraConfig, OptimizerConfig
from megappo.layout.mesh import Layout


@dataclass(frozen=True)
class RoleSettings:
    """What a role needs to know to build itself.

    Attributes:
        folder: Hugging Face folder of its weights.
        layout: its parallel sizes; all ranks of its pool take part.
        dtype: of weights and activations: "float32" or "bfloat16".
        micro_batch_tokens: token budget of one forward pass.
        scalar_head: values or scores instead of logits.
        optimizer: given if the role trains.
        timeout_s: limit on any one collective, in seconds.
        recompute, fp8: as configured for the role.
        offload: what leaves the device when the role rests: "none", "optimizer" or "all".
        lora: adapters that it trains instead of all weights.
        seed: of what is drawn at the beginning.
    """

    folder: str
    layout: Layout
    dtype: str
    micro_batch_tokens: int
    scalar_head: bool = False
    optimizer: OptimizerConfig | None = None
    timeout_s: float = 1800.0
    recompute: str = "none"
    fp8: str = "none"
    offload: str = "none"
    lora: LoraConfig | None = None
    seed: int = 1


@dataclass(frozen=True)
class Totals:
    """Size of a whole mini-batch, over all ranks: the divisors of its loss."""

    rows: int
    tokens: int


@dataclass(frozen=True)
class MiniBatch:
    """One optimizer step: this data-parallel rank's rows, and the size of the whole over all ranks."""

    ids: np.ndarray
    totals: Totals


@dataclass(frozen=True)
class EngineSettings:
    """What an engine needs to know to start.

    Attributes:
        folder: Hugging Face folder of the model it starts from.
        tp: tensor-parallel size.
        dtype: "float32" or "bfloat16".
        max_tokens: longest prompt and response together.
        max_sequences: sequences decoded at once.
        memory_fraction: of a GPU, that the engine may take.
        kv_cache_gib: key/value cache of each worker on CPU.
        on_cuda: whether it runs on GPUs.
        sleep: between generations: "off", "offload" (weights to the host) or "drop" (they come anew by a sync).
        seed: of the engine; requests carry their own.
        stop_token_ids: tokens that end a response, besides the model's end-of-text tokens.
    """

    folder: str
    tp: int
    dtype: str
    max_tokens: int
    max_sequences: int
    memory_fraction: float
    kv_cache_gib: float
    on_cuda: bool
    sleep: str
    seed: int
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sampling:
    """How a response is drawn."""

    temperature: float
    top_p: float
    top_k: int
    max_response: int
