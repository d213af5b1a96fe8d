"""How long a Megatron role's forward passes and updates take, by counting operations and bytes. Standard library only.

A layer's matrix products run at a fraction of the device's rate that falls with the narrowest side of a product and
with the tokens of a micro-batch (weights are read once for all of them). Element-wise kernels move bytes; tensor
parallelism exchanges the residual stream twice a layer each way, and does not overlap; a pipeline fills and drains; the
host must launch a layer's kernels before the device can run them. Products in 8 bits count as if they were not.

The constants were fitted to an H200 (Qwen2.5 shapes; thousand tokens a second, seen / predicted). In a step of 512
sequences of 383 tokens: 0.5B log-probabilities 417 / 385, values 534 / 485, actor's update 143 / 125, critic's 180 /
156. Alone, with micro-batches of 16,384: 1.5B log-probabilities 155 / 144, update 44 / 46, with MLPs recomputed 38 /
37, with layers 38 / 36; 7B log-probabilities 42 / 41, gradients 13.3 / 13.7. What links add is reckoned from their
rates alone and was not compared with a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from megappo.layout.devices import DeviceProfile
from megappo.layout.memory import Shape, stage_adapters, stage_parameters
from megappo.layout.mesh import Layout, held_layers
from megappo.layout.timeline import Phase, total

NARROW = 650.0
"""A product whose narrowest side is this reaches half of the device's rate."""
ATTENTION = 0.5
"""Of the rate of products, what fused attention reaches."""
LAUNCH_FORWARD, LAUNCH_BACKWARD = 2.2e-3, 1.5e-3
"""Seconds in which a host launches a layer's kernels: modules in Python forward, autograd's C++ backward."""
CALL = 10e-3
"""Seconds of a call beside its passes: packing rows, results to the host, the driver's round trip."""
REDUCE = 0.91
"""Of a link's rate between two devices, what a collective reaches (335 of 367 GB/s on NVLink)."""
OPTIMIZER_BYTES, GRADIENT_BYTES = 30, 8
"""Bytes that Adam moves for each parameter (gradient, master weight and two moments in, all but the gradient and the
weight out), and that clearing and measuring a gradient moves."""

PRODUCTS, ATTENDING, HEAD, MEMORY = "matrix products", "attention", "head", "memory-bound kernels"
LAUNCHES, TENSOR, BETWEEN, BUBBLE = "kernel launches", "tensor parallel", "between stages", "pipeline bubble"
REPLICAS, OPTIMIZER, OVERHEAD = "gradients between replicas", "optimizer", "calls"


@dataclass(frozen=True)
class PassUse:
    """What a role computes with and on.

    Attributes:
        vocabulary: rows of the padded embedding.
        item_bytes: of an activation.
        scalar_head: values instead of logits.
        recompute: as in the configuration.
        micro_batch_tokens: token budget of a micro-batch.
        length: tokens of a sequence.
        head_tokens: of them, tokens whose logits are needed.
        adapters: as in :class:`megappo.layout.memory.RoleUse`; the time of their own narrow products is not counted.
    """

    vocabulary: int
    item_bytes: int
    scalar_head: bool
    recompute: str
    micro_batch_tokens: int
    length: float
    head_tokens: float
    adapters: int = 0


def scoring_phase(shape: Shape, layout: Layout, use: PassUse, device: DeviceProfile, sequences: int) -> Phase:
    """One forward pass over ``sequences``, spread over the data-parallel ranks."""
    return total([_passes(shape, layout, use, device, sequences, train=False), Phase({OVERHEAD: CALL})])


def update_phase(
    shape: Shape,
    layout: Layout,
    use: PassUse,
    device: DeviceProfile,
    sequences: int,
    *,
    mini_batch: int,
    epochs: int,
) -> Phase:
    """All optimizer steps of a batch of ``sequences``: mini-batches, epochs times over."""
    steps = [min(mini_batch, sequences - first) for first in range(0, sequences, mini_batch)]
    end = optimizer_phase(shape, layout, use, device)
    sizes = {size: steps.count(size) for size in steps}
    passes = [_passes(shape, layout, use, device, size, train=True).times(count) for size, count in sizes.items()]
    return total([*passes, end.times(len(steps))]).times(epochs)


def optimizer_phase(shape: Shape, layout: Layout, use: PassUse, device: DeviceProfile) -> Phase:
    """What ends an optimizer step: gradients added up over replicas, Adam, weights given back to the replicas."""

    def trained(stage: int) -> int:
        if use.adapters:
            return stage_adapters(shape, layout, stage, adapters=use.adapters, scalar_head=use.scalar_head)
        return stage_parameters(shape, layout, stage, vocabulary=use.vocabulary, scalar_head=use.scalar_head)

    largest = max(trained(stage) for stage in layout.unlike_stages)
    replicas = layout.dp * layout.cp
    link = device.link(layout.tp * replicas > device.devices_per_node) * REDUCE
    exchanged = (4 + use.item_bytes) * largest * (replicas - 1) / replicas
    moved = largest * (OPTIMIZER_BYTES / replicas + GRADIENT_BYTES)
    return Phase({REPLICAS: exchanged / link, OPTIMIZER: moved / device.bandwidth, OVERHEAD: CALL})


def products_rate(device: DeviceProfile, width: float, tokens: float) -> float:
    """Operations a second of a product whose narrowest side is ``width``, over ``tokens`` rows."""
    weights_read = device.flops / device.bandwidth  # rows at which reading bfloat16 weights takes as long as computing
    return device.flops * width / (width + NARROW) * tokens / (tokens + weights_read)


def _passes(shape: Shape, layout: Layout, use: PassUse, device: DeviceProfile, sequences: int, *, train: bool) -> Phase:
    """Micro-batches of one data-parallel rank through the pipeline, forward or there and back."""
    rows = ceil(sequences / layout.dp)
    micro_batches = layout.micro_batches(ceil(rows / max(use.micro_batch_tokens // max(ceil(use.length), 1), 1)))
    tokens = max(rows * use.length / micro_batches, 1.0)
    counts = held_layers(shape.num_layers, layout.pp, layout.vpp)
    kinds = {
        key: _stage(shape, layout, use, device, tokens, layers=key[0], last=key[1], train=train)
        for key in {(count, stage == layout.pp - 1) for stage, count in enumerate(counts)}
    }
    stages = [kinds[count, stage == layout.pp - 1] for stage, count in enumerate(counts)]
    slowest = max(stages, key=lambda stage: stage.seconds)
    # Through a chunk of each stage (arXiv:2104.04473, section 2.2.2).
    filling = (sum(stage.seconds for stage in stages) - slowest.seconds) / layout.vpp
    bubble = Phase({BUBBLE: filling}) if filling else Phase()
    return total([slowest.times(micro_batches), bubble])


def _stage(
    shape: Shape,
    layout: Layout,
    use: PassUse,
    device: DeviceProfile,
    tokens: float,
    *,
    layers: int,
    last: bool,
    train: bool,
) -> Phase:
    """One micro-batch on one stage."""
    layer = _layer(shape, layout, use, device, tokens)
    ends = Phase()
    if last and not use.scalar_head:
        ends = _head(shape, layout, use, device, tokens * use.head_tokens / max(use.length, 1))
    forward = total([layer.times(layers), ends])
    out = [forward, _waiting(forward, layers * LAUNCH_FORWARD)]
    if train:
        products = 1.0 if use.adapters else 2.0  # of frozen weights no gradient is taken
        again = {PRODUCTS: products, ATTENDING: 2.5, HEAD: products, MEMORY: 2.0, TENSOR: 1.0}
        backward = Phase({name: seconds * again[name] for name, seconds in forward.parts.items()})
        if use.recompute == "full":
            backward = total([backward, layer.times(layers)])
        elif use.recompute == "selective":
            repeated = {name: layers * layer.parts[name] for name in (PRODUCTS, MEMORY)}
            backward = total([backward, Phase(repeated).times(_mlp_share(shape))])
        out += [backward, _waiting(backward, layers * LAUNCH_BACKWARD)]
    if layout.pp > 1:
        # Neighbours are as many ranks apart as a stage has.
        link = device.link(layout.tp * layout.dp * layout.cp >= device.devices_per_node)
        stream = tokens * shape.hidden_size * use.item_bytes / (layout.tp if layout.sequence_parallel else 1)
        out.append(Phase({BETWEEN: (2 if train else 1) * layout.vpp * stream / link}))
    return total(out)


def _waiting(work: Phase, launches: float) -> Phase:
    """Time in which the device has nothing to do because the host has not launched it yet."""
    return Phase({LAUNCHES: launches - work.seconds}) if launches > work.seconds else Phase()


def _layer(shape: Shape, layout: Layout, use: PassUse, device: DeviceProfile, tokens: float) -> Phase:
    """One micro-batch forward through one layer on one rank."""
    tp, hidden, ffn = layout.tp, shape.hidden_size, shape.ffn_hidden_size
    query, key_value = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    projections = 2.0 * tokens * hidden * (2 * query + 2 * key_value) / tp
    mlp = 2.0 * tokens * hidden * 3 * ffn / tp
    products = projections / products_rate(device, min(hidden, query / tp), tokens)
    products += mlp / products_rate(device, min(hidden, ffn / tp), tokens)
    attention = 2.0 * tokens * use.length * query / tp / (device.flops * ATTENTION)
    stream = hidden // tp if layout.sequence_parallel else hidden
    moved = tokens * (10 * stream + (3 * ffn + 4 * query + 4 * key_value) / tp) * use.item_bytes
    parts = {PRODUCTS: products, ATTENDING: attention, MEMORY: moved / device.bandwidth}
    if tp > 1:
        # Two sums over the ranks (with sequence parallelism: gather and scatter, of the same bytes).
        exchanged = 2 * 2 * (tp - 1) / tp * tokens * hidden * use.item_bytes
        parts[TENSOR] = exchanged / (device.link(tp > device.devices_per_node) * REDUCE)
    return Phase(parts)


def _mlp_share(shape: Shape) -> float:
    """Of a layer's products, what is the MLP's."""
    projections = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    return 3 * shape.ffn_hidden_size / (3 * shape.ffn_hidden_size + projections)


def _head(shape: Shape, layout: Layout, use: PassUse, device: DeviceProfile, tokens: float) -> Phase:
    """Logits of a micro-batch's response tokens, which are written once and read twice."""
    width = use.vocabulary / layout.tp
    products = 2.0 * tokens * shape.hidden_size * width
    seconds = products / products_rate(device, min(shape.hidden_size, width), max(tokens, 1))
    return Phase({HEAD: seconds + 3 * tokens * width * use.item_bytes / device.bandwidth})
