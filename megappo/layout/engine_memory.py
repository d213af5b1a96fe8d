"""Bytes of a vLLM engine on a device, by counting tensors. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from megappo.layout.memory import FLOAT32, GIB, Shape

ENGINE_STEP = 16384
"""Tokens of the largest forward pass that vLLM reserves room for (its default for ``LLM`` on devices over 70 GiB)."""
ENGINE_OVERHEAD = int(0.25 * GIB)
"""What vLLM takes off its share for libraries, outside torch's allocator (seen on an H200: 0.22 GiB)."""
KV_BLOCK = 16
"""Tokens in a block of vLLM's key/value cache."""


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of one engine on one device.

    Attributes:
        weights: parameters; key/value heads are replicated where there are fewer than ranks.
        sequence: key/value cache of one sequence of the greatest length.
        working: of the largest forward pass, and the sampler's copies of the logits.
        overhead: of libraries.
    """

    weights: int
    sequence: int
    working: int
    overhead: int = ENGINE_OVERHEAD

    @property
    def least(self) -> int:
        """Without less than this the engine does not start."""
        return self.weights + self.sequence + self.working + self.overhead


def engine_memory(
    shape: Shape, tp: int, *, vocabulary: int, item_bytes: int, max_tokens: int, max_sequences: int
) -> EngineMemory:
    """What one of ``tp`` workers of an engine needs.

    Args:
        vocabulary: rows as vLLM pads them, over all workers.
        max_tokens: longest prompt and response together.
        max_sequences: sequences decoded at once.
    """
    hidden, query = shape.hidden_size, shape.num_heads * shape.head_dim // tp
    key_value = max(shape.num_kv_heads // tp, 1) * shape.head_dim
    ffn = shape.ffn_hidden_size // tp
    projected = query + 2 * key_value
    layer = (projected + query + 3 * ffn + 2) * hidden
    layer += (projected if shape.qkv_bias else 0) + (2 * shape.head_dim if shape.qk_norm else 0)
    tables = (1 if shape.tied_embeddings else 2) * (vocabulary // tp) * hidden
    blocks = -(-max_tokens // KV_BLOCK)
    step = max(ENGINE_STEP, max_sequences)
    return EngineMemory(
        weights=(shape.num_layers * layer + tables + hidden) * item_bytes,
        sequence=blocks * KV_BLOCK * shape.num_layers * 2 * key_value * item_bytes,
        working=step * (hidden + 3 * ffn) * item_bytes + 2 * max_sequences * vocabulary * FLOAT32,
    )
