"""Proof by index-valued weights: where a loader really puts each element, against where our table says.

Each element of the model gets a number of its own. Loading these numbers through somebody else's loader and reading
them back tells where everything went. Of the transformer layers the first and the last are looked at: all are loaded by
the same code, and a whole model in numbers would need eight bytes an element.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod

import torch

from megappo.models.spec import ModelSpec
from megappo.reshard.boxes import Box
from megappo.reshard.copies import block

NOTHING = 0
"""The number of elements that no tensor of the model fills, such as vocabulary padding (which loaders fill with 0)."""


def is_probed(name: str, spec: ModelSpec) -> bool:
    """Whether a tensor or parameter is looked at."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return layer is None or int(layer.group(1)) in (0, spec.num_layers - 1)


def index_tensors(spec: ModelSpec, *, probed_only: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's Hugging Face tensors with their elements numbered through, int64, one at a time."""
    begin = NOTHING + 1
    for name, shape in spec.hf_shapes().items():
        if not probed_only or is_probed(name, spec):
            yield name, torch.arange(begin, begin + prod(shape)).view(shape)
        begin += prod(shape)


def rule_elements(
    spec: ModelSpec, boxes: Sequence[Box], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, torch.Tensor]:
    """What the parameters would hold after loading the numbered model, if the boxes are right; int64.

    The boxes must fit (see :func:`misfits`).
    """
    out = {
        name: torch.full(shape, NOTHING, dtype=torch.int64) for name, shape in shapes.items() if is_probed(name, spec)
    }
    by_name: dict[str, list[Box]] = {}
    for box in boxes:
        by_name.setdefault(box.name, []).append(box)
    for name, tensor in index_tensors(spec, probed_only=True):
        for box in by_name.get(name, ()):
            out[box.param][block(box.local_offset, box.size)] = tensor[block(box.offset, box.size)]
    return out


def misfits(boxes: Sequence[Box], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Names of parameters that boxes reach out of, or that are not there at all."""
    return sorted(
        {
            box.param
            for box in boxes
            if box.param not in shapes
            or len(box.size) != len(shapes[box.param])
            or any(o + n > extent for o, n, extent in zip(box.local_offset, box.size, shapes[box.param], strict=True))
        }
    )


def loaded_elements(spec: ModelSpec, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What the parameters hold after ``model.load_weights`` of the numbered model; int64 on the CPU.

    The model's own weights are put back afterwards, in their own storage.
    """
    params = {name: param for name, param in model.named_parameters() if is_probed(name, spec)}
    kept = {name: param.data for name, param in params.items()}
    try:
        for param in params.values():
            param.requires_grad_(False)
            param.data = torch.full(param.shape, NOTHING, dtype=torch.int64)
        model.load_weights(index_tensors(spec, probed_only=True))  # type: ignore[operator]
        found = {name: param.data for name, param in params.items()}
    finally:
        for name, param in params.items():
            param.data = kept[name]
    return found
