"""Which layouts a model and a pool allow: pure arithmetic on plain numbers.

Each rule yields messages of the form ``key: value, why: the legal choices``; keys are those of a role's section.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from megappo.layout.mesh import stage_layers


class ModelSizes(Protocol):
    """The sizes of a model that layouts depend on; :class:`~megappo.models.spec.ModelSpec` has them."""

    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def ffn_hidden_size(self) -> int: ...
    @property
    def num_experts(self) -> int: ...


def divisors(number: int) -> list[int]:
    """All positive divisors, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def megatron_tp(model: ModelSizes) -> list[int]:
    """Tensor parallel sizes that a Megatron role can have, ascending (the pool set aside)."""
    return [tp for tp in divisors(model.num_heads) if not list(_megatron_tp(model, tp))]


def rollout_tp(model: ModelSizes, vocabulary: int) -> list[int]:
    """Tensor parallel sizes that a vLLM engine can have, ascending (the pool set aside)."""
    return [tp for tp in divisors(model.num_heads) if not list(_rollout_tp(model, vocabulary, tp))]


def megatron_vpp(model: ModelSizes, pp: int) -> list[int]:
    """Numbers of chunks that each of ``pp`` pipeline stages can have, ascending: rounds of equally many layers.

    Of two stages, Megatron asks for the same number of layers in a chunk; more may be uneven, as without chunks.
    """
    rounds = [(vpp, model.num_layers // vpp) for vpp in divisors(model.num_layers)]
    return [1, *(vpp for vpp, layers in rounds if 1 < pp <= layers and vpp > 1 and (pp > 2 or layers % 2 == 0))]


def megatron_model_problems(model: ModelSizes, tp: int, pp: int, vpp: int = 1) -> Iterator[str]:
    """What keeps a model from being split over ``tp`` x ``pp`` Megatron ranks. Layers need not divide evenly.

    The vocabulary has no rule: it is padded to a multiple of ``tp``.
    """
    reasons = list(_megatron_tp(model, tp))
    if reasons:
        yield f"tp: {tp} {' and '.join(reasons)}: legal are {_listed(megatron_tp(model))}"
    if pp > model.num_layers:
        yield f"pp: {pp} stages cannot share {model.num_layers} layers: legal are 1 to {model.num_layers}"
    elif pp > 1 and vpp not in (legal := megatron_vpp(model, pp)):
        why = f"chunks of each of {pp} stages cannot share {model.num_layers} layers in rounds of equally many"
        yield f"vpp: {vpp} {why}{' even ones' if pp == 2 else ''}: legal are {_listed(legal)}"


def expert_problems(model: ModelSizes, ep: int, etp: int) -> Iterator[str]:
    """What keeps a mixture's experts from being dealt out to ``ep`` ranks, each expert cut for ``etp``."""
    for key, size, total, what in (
        ("ep", ep, model.num_experts, "experts"),
        ("etp", etp, model.ffn_hidden_size, "MLP columns of an expert"),
    ):
        for reason in _not_dividing(size, total, what):
            yield f"{key}: {size} {reason}: legal are {_listed(divisors(total))}"


def pipeline_warnings(model: ModelSizes, pp: int, vpp: int = 1) -> Iterator[str]:
    """What a pipeline allows but makes slow. Numbers of stages that do not fit are passed over.

    Megatron's middle stages are all of one size, so some numbers of layers can only be shared very unevenly.
    """
    layers, left = divmod(model.num_layers, vpp)  # of a round
    if left or not 1 < pp <= layers:
        return
    fullest, least = vpp * max(map(len, stage_layers(layers, pp))), vpp * -(-layers // pp)
    if fullest > least:
        even = [size for size in divisors(layers) if size <= 2 * pp]
        yield (
            f"pp: {pp} stages share {model.num_layers} layers unevenly: the fullest has {fullest} where {least} would "
            f"do, so that the others wait: even are {_listed(even)}"
        )


FP8_MULTIPLE, FP8_BLOCK = 16, 128
"""Matrix products in 8 bits take sizes that the first divides; what is gathered in blocks with a scale, the second."""


def fp8_multiple(fp8: str, sequence_parallel: bool) -> int:
    """What must divide the tokens of one rank's products (1 if they are not in 8 bits).

    Under sequence parallelism Transformer Engine gathers inputs in 8 bits: whole blocks, where each has its scale.
    """
    return 1 if fp8 == "none" else FP8_BLOCK if fp8 == "blockwise" and sequence_parallel else FP8_MULTIPLE


def fp8_problems(model: ModelSizes, tp: int, fp8: str, sequence_parallel: bool) -> Iterator[str]:
    """What keeps the layers' matrix products from running in 8 bits, if they are to."""
    if fp8 == "none":
        return
    multiple = fp8_multiple(fp8, sequence_parallel)
    sizes = {
        "hidden size": (model.hidden_size, multiple),
        "query columns a rank": (model.num_heads * model.head_dim // tp, FP8_MULTIPLE),
        "query, key and value columns a rank": (
            (model.num_heads + 2 * model.num_kv_heads) * model.head_dim // tp,
            FP8_MULTIPLE,
        ),
        "MLP columns a rank": (model.ffn_hidden_size // tp, FP8_MULTIPLE),
    }
    odd = [f"{size} {what}, which {divisor} must divide" for what, (size, divisor) in sizes.items() if size % divisor]
    if odd:
        way = "set sequence_parallel to false" if multiple == FP8_BLOCK else "lower tp"
        yield f"fp8: {fp8} at tp {tp}: the model has {' and '.join(odd)}: set none, or {way}"


def megatron_pool_problems(tp: int, pp: int, nodes: int, devices_per_node: int) -> Iterator[str]:
    """What keeps ``tp`` x ``pp`` from fitting a pool. The data parallel size is what is left."""
    devices = nodes * devices_per_node
    if devices % (tp * pp):
        yield (
            f"tp: {tp} times pp {pp} does not divide the {_count(devices, 'device')} of the pool: "
            f"legal tp * pp are {_listed(divisors(devices))}"
        )


def megatron_size_problems(tp: int, sequence_parallel: bool, pp: int = 1, vpp: int = 1) -> Iterator[str]:
    """What is wrong with the sizes by themselves."""
    if vpp > 1 and pp == 1:
        yield f"vpp: {vpp} chunks of a pipeline stage need pp > 1: set it to 1, or raise pp"
    if sequence_parallel and tp == 1:
        yield "sequence_parallel: true needs tp > 1: set it to false, or raise tp"


def megatron_pool_warnings(tp: int, nodes: int, devices_per_node: int) -> Iterator[str]:
    """What a pool allows but makes slow."""
    if nodes > 1 and devices_per_node % tp:
        yield (
            f"tp: {tp} does not divide the {_count(devices_per_node, 'device')} of a node, so tensor parallel groups "
            f"cross nodes, which is slow: sizes within a node are {_listed(divisors(devices_per_node))}"
        )


def rollout_model_problems(model: ModelSizes, vocabulary: int, tp: int) -> Iterator[str]:
    """What keeps a vLLM engine from splitting a model over ``tp`` devices.

    ``vocabulary`` counts rows as vLLM pads them, which it then splits evenly. It replicates key/value heads.
    """
    reasons = list(_rollout_tp(model, vocabulary, tp))
    if reasons:
        yield f"tp: {tp} {' and '.join(reasons)}: legal are {_listed(rollout_tp(model, vocabulary))}"


def rollout_pool_problems(tp: int, devices_per_node: int) -> Iterator[str]:
    """What keeps engines of ``tp`` devices from filling a pool. An engine stays within a node."""
    if tp > devices_per_node:
        yield (
            f"tp: an engine of {tp} devices does not fit in a node of {devices_per_node}: "
            f"legal are {_listed(divisors(devices_per_node))}"
        )
    elif devices_per_node % tp:
        yield (
            f"tp: engines of {tp} devices do not fill a node of {devices_per_node}: "
            f"legal are {_listed(divisors(devices_per_node))}"
        )


def _megatron_tp(model: ModelSizes, tp: int) -> Iterator[str]:
    yield from _not_dividing(tp, model.num_heads, "attention heads")
    if tp > model.num_kv_heads:
        yield f"is more than {_count(model.num_kv_heads, 'key/value head')} (training does not replicate them)"
    else:
        yield from _not_dividing(tp, model.num_kv_heads, "key/value heads")
    if not model.num_experts:
        yield from _not_dividing(tp, model.ffn_hidden_size, "MLP columns")


def _rollout_tp(model: ModelSizes, vocabulary: int, tp: int) -> Iterator[str]:
    yield from _not_dividing(tp, model.num_heads, "attention heads")
    if model.num_kv_heads % tp and tp % model.num_kv_heads:
        yield f"neither divides nor is a multiple of {model.num_kv_heads} key/value heads"
    yield from _not_dividing(tp, model.ffn_hidden_size, "MLP columns")
    yield from _not_dividing(tp, vocabulary, "padded vocabulary rows")


def _not_dividing(tp: int, size: int, what: str) -> Iterator[str]:
    if size % tp:
        yield f"does not divide {size} {what}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
