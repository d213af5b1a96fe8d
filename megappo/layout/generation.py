"""How long vLLM engines generate: a roofline of each decoding step, and the host that schedules it.

Standard library only. A step reads the weights and the keys and values of every running sequence, computes for one
token each, and waits for vLLM's scheduler and sampler on the host, which do not overlap with it. Seen on an H200 (0.5B,
512 prompts of 128 tokens, 256 new ones): 20 to 48 thousand tokens a second, by host; predicted 33.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from megappo.layout.devices import DeviceProfile
from megappo.layout.engine_memory import EngineMemory
from megappo.layout.memory import Shape
from megappo.layout.passes import REDUCE, products_rate
from megappo.layout.timeline import Phase

READ = 0.85
"""Of the rate of a copy, what kernels reach that read weights or cached keys and values."""
GRAPH_LAYER = 30e-6
"""Seconds that a layer's kernels take at least, launched as a CUDA graph."""
SUM_LATENCY = 15e-6
"""Seconds that a sum over tensor-parallel ranks takes at least."""
SAMPLER_PASSES = 6
"""Times that the sampler reads or writes float32 logits, log-probabilities included."""

SCHEDULER, WEIGHTS, CACHE = "vLLM's scheduler on the host", "reading weights", "reading keys and values"
COMPUTING, SAMPLER, SMALL, TENSOR, PREFILL = "matrix products", "sampler", "small kernels", "tensor parallel", "prompts"


@dataclass(frozen=True)
class Load:
    """What one engine has to generate.

    Attributes:
        sequences: in all.
        slots: that it decodes at once.
        prompt, response: tokens of a sequence, on average.
        longest: tokens of the longest response.
        streams: those of later batches take the places of what is done, until a weight sync interrupts them all.
    """

    sequences: int
    slots: int
    prompt: float
    response: float
    longest: float
    streams: bool = False

    @property
    def steps(self) -> float:
        """Decoding steps: waves of sequences, and the longest one's tail; in a stream all places are always taken."""
        if self.streams:
            return self.sequences * self.response / max(self.slots, 1)
        return ceil(self.sequences / max(self.slots, 1)) * self.response + self.longest - self.response

    @property
    def read(self) -> float:
        """Tokens that are read before the first is drawn: prompts, and after an interruption what was there already."""
        again = self.running * (self.prompt + self.response / 2) if self.streams else 0.0
        return self.sequences * self.prompt + again

    @property
    def running(self) -> float:
        """Sequences in a step, on average."""
        return self.sequences * self.response / self.steps if self.steps else 0.0


def cached_sequences(memory: EngineMemory, share: int) -> int:
    """Sequences of the greatest length whose keys and values fit in an engine's share of a device, in bytes."""
    return max((share - memory.least + memory.sequence) // memory.sequence, 0)


def generation_phase(
    shape: Shape, tp: int, memory: EngineMemory, vocabulary: int, item_bytes: int, load: Load, device: DeviceProfile
) -> Phase:
    """Prompts and all decoding steps of one engine of ``tp`` devices."""
    batch, link = load.running, device.link(tp > device.devices_per_node) * REDUCE
    hidden, query = shape.hidden_size, shape.num_heads * shape.head_dim
    key_value = max(shape.num_kv_heads / tp, 1) * shape.head_dim
    per_layer = hidden * (2 * query + 2 * shape.num_kv_heads * shape.head_dim + 3 * shape.ffn_hidden_size)
    body = 2.0 * shape.num_layers * per_layer / tp  # operations of a token
    head = 2.0 * vocabulary * hidden / tp
    width = min(hidden, shape.ffn_hidden_size / tp)
    rate = products_rate(device, width, 1e9)  # weights are counted apart
    reads = device.bandwidth * READ
    cached = shape.num_layers * 2 * key_value * item_bytes * (load.prompt + load.response / 2)
    tokens = load.read
    prompts = tokens * (body + 2.0 * shape.num_layers * load.prompt * query / tp) / rate
    step = {
        SCHEDULER: device.engine_step_ms * 1e-3 + batch * device.engine_sequence_us * 1e-6,
        WEIGHTS: memory.weights / reads,
        CACHE: batch * cached / reads,
        COMPUTING: batch * (body + head) / rate,
        SAMPLER: batch * vocabulary * 4 * SAMPLER_PASSES / device.bandwidth,
        SMALL: shape.num_layers * GRAPH_LAYER,
    }
    if tp > 1:
        exchanged = 2 * shape.num_layers * 2 * (tp - 1) / tp * hidden * item_bytes / link
        step[TENSOR] = 2 * shape.num_layers * SUM_LATENCY + batch * exchanged
        prompts += tokens * exchanged
    return Phase({**{name: load.steps * seconds for name, seconds in step.items()}, PREFILL: prompts})
