"""Megatron's parameters before they are cut, and where in them each piece of each Hugging Face tensor lies."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from megappo.layout.mesh import Layout
from megappo.models.parameters import EMBEDDING, FINAL_NORM, LM_HEAD, Split, megatron_vocabulary
from megappo.models.spec import ModelError, ModelSpec
from megappo.reshard.boxes import Box, megatron_boxes

Block = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and size."""


@dataclass(frozen=True)
class MegatronTensor:
    """One parameter of the whole model.

    Attributes:
        name: as Megatron's modules have it, layers counted over the whole model, norms as Transformer Engine names
            them (checkpoints always do).
        split: how tensor parallelism cuts it.
        boxes: the Hugging Face tensors in it; what they leave free is padding of the vocabulary.
    """

    name: str
    shape: tuple[int, ...]
    split: Split
    boxes: tuple[Box, ...]

    @property
    def layer(self) -> int | None:
        """The layer that it belongs to, if any."""
        match = re.match(r"decoder\.layers\.(\d+)\.", self.name)
        return int(match[1]) if match else None

    @property
    def key(self) -> str:
        """Its name in checkpoints, where all layers' parameters of one kind are one tensor with an axis in front."""
        return re.sub(r"^(decoder\.layers)\.\d+\.", r"\1.", self.name)

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

    Raises:
        ModelError: it is a mixture of experts.
    """
    if spec.num_experts:
        raise ModelError([f"{spec.family}: checkpoints of mixtures of experts are not converted: give a dense model"])
    layer = {parameter.megatron_te or parameter.megatron: parameter.split for parameter in spec.layer}
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
