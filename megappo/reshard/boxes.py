"""Where each piece of each tensor lives: boxes in Hugging Face coordinates, for Megatron ranks and vLLM workers.

Pure arithmetic on the parameter table: the same lists come out on every machine, without a model in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megappo.layout.mesh import Layout, stage_layers
from megappo.models.parameters import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    Parameter,
    Split,
    megatron_vocabulary,
    vllm_vocabulary,
)
from megappo.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Box:
    """A block of a global tensor, and the equally sized block of a local parameter that holds it.

    Attributes:
        name: Hugging Face name of the global tensor.
        offset, size: the block in the global tensor, in elements.
        rank: who holds it.
        param: name of the local parameter.
        local_offset: the block's place in the local parameter; its size there is ``size`` too.
    """

    name: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    rank: int
    param: str
    local_offset: tuple[int, ...]


def megatron_boxes(
    spec: ModelSpec, layout: Layout, rank: int, *, scalar_head: bool = False, fused_norms: bool = False
) -> list[Box]:
    """What a Megatron rank holds.

    Args:
        rank: in ``layout``.
        scalar_head: the model ends in a scalar head.
        fused_norms: the layers are Transformer Engine's, which name the norms otherwise.
    """
    at = layout.coordinates(rank)
    part = _Part(spec, layout.tp, at["tp"], rank, interleaved=True)
    first, last = at["pp"] == 0, at["pp"] == layout.pp - 1
    out: list[Box] = []
    if first:
        out += part.boxes(EMBEDDING, EMBEDDING.megatron)
    for local_index, index in enumerate(stage_layers(spec.num_layers, layout.pp)[at["pp"]]):
        for parameter in spec.layer:
            name = (fused_norms and parameter.megatron_te) or parameter.megatron
            out += part.boxes(parameter, f"decoder.layers.{local_index}.{name}", f"model.layers.{index}.")
    if last:
        out += part.boxes(FINAL_NORM, FINAL_NORM.megatron)
        head = spec.head(scalar_head)
        if not (head is EMBEDDING and first):  # tied on one stage: the embedding itself is the head
            out += part.boxes(head, LM_HEAD.megatron)
    return out


def vllm_boxes(spec: ModelSpec, tp: int, tp_rank: int, rank: int) -> list[Box]:
    """What a vLLM worker holds.

    Args:
        tp, tp_rank: the engine's tensor-parallel size and this worker's place in it.
        rank: the number by which the plan shall know this worker.
    """
    part = _Part(spec, tp, tp_rank, rank, interleaved=False)
    out = part.boxes(EMBEDDING, EMBEDDING.vllm)
    for index in range(spec.num_layers):
        prefix = f"model.layers.{index}."
        for parameter in spec.layer:
            out += part.boxes(parameter, prefix + parameter.vllm, prefix)
    out += part.boxes(FINAL_NORM, FINAL_NORM.vllm)
    if not spec.tied_embeddings:
        out += part.boxes(LM_HEAD, LM_HEAD.vllm)
    return out


@dataclass(frozen=True)
class _Part:
    """One tensor-parallel rank's view of the table."""

    spec: ModelSpec
    tp: int
    tp_rank: int
    rank: int
    interleaved: bool  # Megatron's order inside fused parameters and its vocabulary padding; else vLLM's

    def boxes(self, parameter: Parameter, local_name: str, prefix: str = "") -> list[Box]:
        dims = self.spec.dims()
        shapes = [tuple(dims[key] for key in shape) for shape in parameter.shapes]
        local_row = 0
        out = []
        for which, begin, count in self._pieces(parameter.split, shapes):
            axis = 1 if parameter.split is Split.COLUMNS else 0
            offset, size, local = [0] * len(shapes[which]), list(shapes[which]), [0] * len(shapes[which])
            offset[axis], size[axis], local[0] = begin, count, local_row
            local_row += count if axis == 0 else 0
            if count > 0:
                name = prefix + parameter.hf[which]
                out.append(Box(name, tuple(offset), tuple(size), self.rank, local_name, tuple(local)))
        return out

    def _pieces(self, split: Split, shapes: list[tuple[int, ...]]) -> Iterator[tuple[int, int, int]]:
        """(which global tensor, begin, count) along the cut axis, in the order in which they lie in memory."""
        tp, at = self.tp, self.tp_rank
        if split is Split.WHOLE:
            yield 0, 0, shapes[0][0]
        elif split in (Split.ROWS, Split.COLUMNS):
            extent = shapes[0][1 if split is Split.COLUMNS else 0]
            yield 0, at * extent // tp, extent // tp
        elif split is Split.GATE_UP:
            for which, shape in enumerate(shapes):
                yield which, at * shape[0] // tp, shape[0] // tp
        elif split is Split.VOCABULARY:
            rows = shapes[0][0]
            padded = megatron_vocabulary(rows, tp) if self.interleaved else vllm_vocabulary(rows)
            held = padded // tp
            begin = min(at * held, rows)
            yield 0, begin, min(begin + held, rows) - begin
        else:
            yield from self._qkv()

    def _qkv(self) -> Iterator[tuple[int, int, int]]:
        spec, tp, at = self.spec, self.tp, self.tp_rank
        head, per_group = spec.head_dim, spec.num_heads // spec.num_kv_heads
        groups = max(spec.num_kv_heads // tp, 1)
        first_group = at * spec.num_kv_heads // tp  # with more ranks than groups, neighbours hold copies of one
        if self.interleaved:
            for group in range(first_group, first_group + groups):
                yield 0, group * per_group * head, per_group * head
                yield 1, group * head, head
                yield 2, group * head, head
        else:
            heads = spec.num_heads // tp
            yield 0, at * heads * head, heads * head
            yield 1, first_group * head, groups * head
            yield 2, first_group * head, groups * head
