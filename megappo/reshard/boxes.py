"""Where each piece of each tensor lives: boxes in Hugging Face coordinates, for Megatron ranks, vLLM workers and files.

Pure arithmetic on the parameter table: the same lists come out on every machine, without a model in memory. Ranks that
hold the same are listed once, as a shard: a list grows with the pieces that a model is cut into, not with the cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from megappo.layout.mesh import Layout, model_chunks
from megappo.models.parameters import (
    EMBEDDING,
    EXPERT,
    FINAL_NORM,
    LM_HEAD,
    Parameter,
    Split,
    megatron_vocabulary,
    vllm_vocabulary,
)
from megappo.models.spec import ModelSpec


class Box(NamedTuple):
    """A block of a global tensor, and the equally sized block of a local parameter that holds it.

    Attributes:
        name: Hugging Face name of the global tensor.
        offset, size: the block in the global tensor, in elements.
        rank: who holds it.
        param: name of the local parameter.
        local_offset: the block's place in the local parameter; its size there is ``size`` too. Where the parameter
            stacks experts, their index comes first, and has no counterpart in ``size``.
    """

    name: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    rank: int
    param: str
    local_offset: tuple[int, ...]


class Shard(NamedTuple):
    """What several ranks hold alike. The boxes are those of the first rank; the others' differ in the rank only."""

    ranks: Sequence[int]
    boxes: Sequence[Box]


def megatron_boxes(
    spec: ModelSpec, layout: Layout, rank: int, *, scalar_head: bool = False, fused_norms: bool = False
) -> list[Box]:
    """What a Megatron rank holds.

    Args:
        rank: in ``layout``.
        scalar_head: the model ends in a scalar head.
        fused_norms: the layers are Transformer Engine's, which name some parameters otherwise.
    """
    at = layout.coordinates(rank)
    stage = _Stage(spec, layout, at["pp"], scalar_head, fused_norms)
    place = rank - layout.rank(pp=at["pp"])
    boxes = stage.dense(at["tp"], rank)
    if spec.num_experts:
        boxes += stage.experts(place % layout.expert_tp, place // layout.expert_tp % layout.ep, rank)
    return boxes


def megatron_shards(
    spec: ModelSpec, layout: Layout, *, scalar_head: bool = False, fused_norms: bool = False
) -> list[Shard]:
    """What all Megatron ranks hold: dense weights by stage and tensor-parallel place, then experts likewise."""
    stages = [_Stage(spec, layout, pp, scalar_head, fused_norms) for pp in range(layout.pp)]
    out = []
    for stage in stages:
        for tp in range(layout.tp):
            ranks = layout.replicas(tp=tp, pp=stage.pp)
            out.append(Shard(ranks, stage.dense(tp, ranks[0])))
    for stage in stages if spec.num_experts else ():
        for ep in range(layout.ep):
            for etp in range(layout.expert_tp):
                ranks = layout.expert_replicas(etp=etp, ep=ep, pp=stage.pp)
                out.append(Shard(ranks, stage.experts(etp, ep, ranks[0])))
    return out


def vllm_boxes(spec: ModelSpec, tp: int, tp_rank: int, rank: int, *, expert_parallel: bool = False) -> list[Box]:
    """What a vLLM worker holds.

    Args:
        tp, tp_rank: the engine's tensor-parallel size and this worker's place in it.
        rank: the number by which the plan shall know this worker.
        expert_parallel: whole experts are dealt out to the workers, instead of a part of each expert to each worker.
    """
    dense = _Part(spec, tp, tp_rank, rank, interleaved=False)
    whole = _Part(spec, 1, 0, rank, interleaved=False, experts=_share(spec.num_experts, tp, tp_rank))
    sliced = dense._replace(experts=range(spec.num_experts))
    out = [*dense.boxes(EMBEDDING, EMBEDDING.vllm)]
    for index in range(spec.num_layers):
        prefix = f"model.layers.{index}."
        for parameter in spec.layer:
            part = dense if not parameter.per_expert else whole if expert_parallel else sliced
            out += part.boxes(parameter, prefix + parameter.vllm, prefix)
    out += dense.boxes(FINAL_NORM, FINAL_NORM.vllm)
    if not spec.tied_embeddings:
        out += dense.boxes(LM_HEAD, LM_HEAD.vllm)
    return out


def vllm_shards(
    spec: ModelSpec, tp: int, engines: int, first_rank: int, *, expert_parallel: bool = False
) -> list[Shard]:
    """What the workers of all engines hold, by their place in the engine.

    Args:
        first_rank: number of the first engine's first worker; the others follow, engine by engine.
    """
    out = []
    for tp_rank in range(tp):
        ranks = range(first_rank + tp_rank, first_rank + tp_rank + tp * engines, tp)
        out.append(Shard(ranks, vllm_boxes(spec, tp, tp_rank, ranks[0], expert_parallel=expert_parallel)))
    return out


def file_boxes(spec: ModelSpec, rank: int, *, scalar_head: bool = False) -> list[Box]:
    """What a Hugging Face checkpoint holds: every tensor, whole and under its own name."""
    return [
        Box(name, (0,) * len(shape), shape, rank, name, (0,) * len(shape))
        for name, shape in spec.hf_shapes(scalar_head=scalar_head).items()
    ]


class _Stage(NamedTuple):
    """One pipeline stage of Megatron's."""

    spec: ModelSpec
    layout: Layout
    pp: int
    scalar_head: bool
    fused_norms: bool

    def dense(self, tp: int, rank: int) -> list[Box]:
        """All but the experts, at one place of the tensor-parallel group."""
        spec, layout = self.spec, self.layout
        part = _Part(spec, layout.tp, tp, rank, interleaved=True)
        first, last = self.pp == 0, self.pp == layout.pp - 1
        out: list[Box] = []
        if first:
            out += part.boxes(EMBEDDING, self._chunk(0) + EMBEDDING.megatron)
        out += self._layers(part)
        if last:
            prefix = self._chunk(layout.vpp - 1)
            out += part.boxes(FINAL_NORM, prefix + FINAL_NORM.megatron)
            head = spec.head(self.scalar_head)
            if not (head is EMBEDDING and first):  # tied on one stage: the embedding itself is the head
                out += part.boxes(head, prefix + LM_HEAD.megatron)
        return out

    def experts(self, etp: int, ep: int, rank: int) -> list[Box]:
        """The experts, at one place of the expert-parallel and expert-tensor-parallel groups."""
        held = _share(self.spec.num_experts, self.layout.ep, ep)
        return self._layers(_Part(self.spec, self.layout.expert_tp, etp, rank, interleaved=True, experts=held))

    def _layers(self, part: _Part) -> list[Box]:
        out: list[Box] = []
        chunks = model_chunks(self.spec.num_layers, self.layout.pp, self.layout.vpp)[self.pp]
        for chunk, layers in enumerate(chunks):
            for local_index, index in enumerate(layers):
                for parameter in self.spec.layer:
                    if parameter.per_expert == (part.experts is not None):
                        name = (self.fused_norms and parameter.megatron_te) or parameter.megatron
                        local_name = f"{self._chunk(chunk)}decoder.layers.{local_index}.{name}"
                        out += part.boxes(parameter, local_name, f"model.layers.{index}.")
        return out

    def _chunk(self, chunk: int) -> str:
        """Each chunk of a virtual pipeline is a model of its own, with layers from 0 (``model0`` in checkpoints)."""
        return f"model{chunk}." if self.layout.vpp > 1 else ""


class _Part(NamedTuple):
    """One tensor-parallel place's view of the table."""

    spec: ModelSpec
    tp: int
    tp_rank: int
    rank: int
    interleaved: bool  # Megatron's order inside fused parameters and its vocabulary padding; else vLLM's
    experts: range | None = None  # those held, for parameters of experts

    def boxes(self, parameter: Parameter, local_name: str, prefix: str = "") -> Iterator[Box]:
        """The boxes of one local parameter, or of one for each expert."""
        cuts = _cuts(self.spec, parameter, self.tp, self.tp_rank, self.interleaved)
        if not parameter.per_expert:
            for which, offset, size, local in cuts:
                yield Box(prefix + parameter.hf[which], offset, size, self.rank, local_name, local)
            return
        stacked = EXPERT not in local_name
        for held, expert in enumerate(self.experts or ()):
            param = local_name if stacked else local_name.replace(EXPERT, str(held))
            for which, offset, size, local in cuts:
                name = prefix + parameter.hf[which].replace(EXPERT, str(expert))
                yield Box(name, offset, size, self.rank, param, (held, *local) if stacked else local)


def _share(count: int, parts: int, part: int) -> range:
    """A part of ``count`` things dealt out in a row; the first parts take what does not divide, as in vLLM."""
    each, left = divmod(count, parts)
    begin = part * each + min(part, left)
    return range(begin, begin + each + (part < left))


Cut = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""(which Hugging Face tensor, offset, size, local offset)"""


@cache
def _cuts(spec: ModelSpec, parameter: Parameter, tp: int, tp_rank: int, interleaved: bool) -> tuple[Cut, ...]:
    """What a tensor-parallel place holds of a parameter; the same in every layer and for every expert."""
    dims = spec.dims()
    shapes = [tuple(dims[key] for key in shape) for shape in parameter.shapes]
    axis = 1 if parameter.split is Split.COLUMNS else 0
    local_row = 0
    out = []
    for which, begin, count in _pieces(spec, parameter.split, shapes, tp, tp_rank, interleaved):
        offset, size, local = [0] * len(shapes[which]), list(shapes[which]), [0] * len(shapes[which])
        offset[axis], size[axis], local[0] = begin, count, local_row
        local_row += count if axis == 0 else 0
        if count > 0:
            out.append((which, tuple(offset), tuple(size), tuple(local)))
    return tuple(out)


def _pieces(
    spec: ModelSpec, split: Split, shapes: list[tuple[int, ...]], tp: int, at: int, interleaved: bool
) -> Iterator[tuple[int, int, int]]:
    """(which tensor, begin, count) along the cut axis, in the order in which they lie in memory."""
    if split is Split.WHOLE:
        yield 0, 0, shapes[0][0]
    elif split is Split.VOCABULARY:
        rows = shapes[0][0]
        held = (megatron_vocabulary(rows, tp) if interleaved else vllm_vocabulary(rows)) // tp
        begin = min(at * held, rows)
        yield 0, begin, min(begin + held, rows) - begin
    elif split is Split.QKV:
        yield from _interleaved_qkv(spec, tp, at) if interleaved else _stacked_qkv(spec, tp, at)
    elif split is Split.KEY_VALUES:
        rows = max(spec.num_kv_heads // tp, 1) * spec.head_dim
        yield 0, at * spec.num_kv_heads // tp * spec.head_dim, rows
    else:
        for which, shape in enumerate(shapes):
            extent = shape[1 if split is Split.COLUMNS else 0]
            yield which, at * extent // tp, extent // tp


def _stacked_qkv(spec: ModelSpec, tp: int, at: int) -> Iterator[tuple[int, int, int]]:
    """vLLM's: with more workers than key/value heads, neighbours hold copies of one head."""
    queries, key_values = spec.num_heads // tp, max(spec.num_kv_heads // tp, 1)
    first = at * spec.num_kv_heads // tp
    yield 0, at * queries * spec.head_dim, queries * spec.head_dim
    yield 1, first * spec.head_dim, key_values * spec.head_dim
    yield 2, first * spec.head_dim, key_values * spec.head_dim


def _interleaved_qkv(spec: ModelSpec, tp: int, at: int) -> Iterator[tuple[int, int, int]]:
    """Megatron's: ``[queries, key, value]`` of each group in turn, cut into ``tp`` equal runs of rows.

    With more ranks than groups a run ends inside a group, at any row (Megatron then gathers activations and holds no
    copies).
    """
    head, queries = spec.head_dim, spec.num_heads // spec.num_kv_heads * spec.head_dim
    run = spec.num_kv_heads * (queries + 2 * head) // tp
    begin, end = at * run, (at + 1) * run
    for group in range(spec.num_kv_heads):
        row = group * (queries + 2 * head)
        for which, extent in ((0, queries), (1, head), (2, head)):
            low, high = max(row, begin), min(row + extent, end)
            if low < high:
                yield which, group * extent + low - row, high - low
            row += extent
