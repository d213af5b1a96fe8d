"""Megatron's parameters before they are cut, and where in them each piece of each Hugging Face tensor lies."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from megappo.layout.mesh import Layout
from megappo.models.parameters import EMBEDDING, EXPERT, FINAL_NORM, LM_HEAD, Split, megatron_vocabulary
from megappo.models.spec import ModelSpec
from megappo.reshard.boxes import Box, megatron_boxes

Block = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and size."""


_LAYER = re.compile(r"^(decoder\.layers)\.(\d+)\.")
_EXPERT = re.compile(r"(\.experts)\.(linear_fc\d\.weight)(\d+)$")


@dataclass(frozen=True)
class MegatronTensor:
    """One parameter of the whole model.

    Attributes:
        name: as Transformer Engine's modules have it, layers and experts counted over the whole model.
        split: how tensor parallelism cuts it.
        boxes: the Hugging Face tensors in it; what they leave free is padding of the vocabulary.
    """

    name: str
    shape: tuple[int, ...]
    split: Split
    boxes: tuple[Box, ...]

    @cached_property
    def key(self) -> str:
        """Its name in checkpoints, where all layers' parameters of one kind are one tensor with an axis in front.

        Those of experts have a second such axis, and this name whichever module of Megatron's holds them.
        """
        return _EXPERT.sub(r"\1.experts.\2", _LAYER.sub(r"\1.", self.name))

    @cached_property
    def index(self) -> tuple[int, ...]:
        """Its place on the axes in front: its layer, if it has one, and its expert."""
        layer, expert = _LAYER.match(self.name), _EXPERT.search(self.name)
        return tuple(int(match[number]) for match, number in ((layer, 2), (expert, 3)) if match)

    @property
    def layer(self) -> int | None:
        """The layer that it belongs to, if any."""
        return self.index[0] if self.index else None

    @property
    def expert(self) -> int | None:
        """The expert that it belongs to, if any."""
        return self.index[1] if len(self.index) > 1 else None

    def overlaps(self, offset: Sequence[int], size: Sequence[int]) -> Iterator[tuple[str, Block, tuple[int, ...]]]:
        """What lies in a block of this parameter: (Hugging Face name, block there, offset inside the given block)."""
        for box in self.boxes:
            begin = [max(a, b) for a, b in zip(offset, box.local_offset, strict=True)]
            ends = [min(a + m, b + n) for a, m, b, n in zip(offset, size, box.local_offset, box.size, strict=True)]
            extent = tuple(end - start for end, start in zip(ends, begin, strict=True))
            if min(extent) > 0:
                there = tuple(
                    o + start - low for o, start, low in zip(box.offset, begin, box.local_offset, strict=True)
                )
                here = tuple(start - low for start, low in zip(begin, offset, strict=True))
                yield box.name, (there, extent), here

    def cuts(self, tp: int) -> list[Block]:
        """The block of each tensor-parallel rank, in their order; two a rank for fused gate and up, one for all if
        it is not cut."""
        axis, parts = {
            Split.WHOLE: (0, 1),
            Split.COLUMNS: (1, tp),
            Split.GATE_UP: (0, 2 * tp),
        }.get(self.split, (0, tp))
        extent = self.shape[axis] // parts
        blocks = []
        for part in range(parts):
            offset, size = [0] * len(self.shape), list(self.shape)
            offset[axis], size[axis] = part * extent, extent
            blocks.append((tuple(offset), tuple(size)))
        return blocks


def megatron_tensors(spec: ModelSpec, tp: int = 1, *, scalar_head: bool = False) -> dict[str, MegatronTensor]:
    """The parameters of the whole model by name, in the order of its layers.

    Args:
        tp: tensor-parallel size, which sets the padding of the vocabulary.
    """
    layer = {
        (parameter.megatron_te or parameter.megatron).replace(EXPERT, str(expert)): parameter.split
        for parameter in spec.layer
        for expert in range(spec.num_experts if parameter.per_expert else 1)
    }
    splits = {
        EMBEDDING.megatron: EMBEDDING.split,
        FINAL_NORM.megatron: FINAL_NORM.split,
        LM_HEAD.megatron: spec.head(scalar_head).split,
        **{
            f"decoder.layers.{i}.{name}": split
            for i, name in product(range(spec.num_layers), layer)
            for split in [layer[name]]
        },
    }
    grouped: dict[str, list[Box]] = {}
    for box in megatron_boxes(spec, Layout(), 0, scalar_head=scalar_head, fused_norms=True):
        grouped.setdefault(box.param, []).append(box)
    out = {}
    for name, boxes in grouped.items():
        ends = zip(
            *([low + n for low, n in zip(box.local_offset, box.size, strict=True)] for box in boxes), strict=True
        )
        shape = [max(axis) for axis in ends]
        if splits[name] is Split.VOCABULARY:
            shape[0] = megatron_vocabulary(spec.vocab_size, tp)
        out[name] = MegatronTensor(name, tuple(shape), splits[name], tuple(boxes))
    return out


def stacked_shapes(tensors: Iterable[MegatronTensor]) -> dict[str, tuple[int, ...]]:
    """Shapes in a checkpoint, by key: those of the parameters, with the axes of layers and experts in front."""
    last = {tensor.key: tensor for tensor in tensors}  # of each kind: layers and experts ascend
    return {key: (*(place + 1 for place in tensor.index), *tensor.shape) for key, tensor in last.items()}
