"""Factors of low-rank adapters by their boxes: how they begin, and how they are merged into the weights they adapt.

A merged weight is ``W + alpha / rank * B A``, computed in float64 and then rounded to the type of W: in whichever
blocks it is computed, it comes out the same (but for an element in 10^8, in float32, that lies just between two
numbers). It is always made from W itself, never from an earlier merged weight, so that nothing drifts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from megappo.models.lora import A, factor_names, is_adapter
from megappo.models.spec import ModelSpec
from megappo.reshard.boxes import Box
from megappo.reshard.copies import block

CHUNK_ELEMENTS = 1 << 22
"""Of a weight, that are merged at a time: 32 MiB in float64."""


@torch.no_grad()
def initialise(spec: ModelSpec, params: Mapping[str, torch.Tensor], boxes: Iterable[Box], seed: int) -> None:
    """Fill this rank's part of each A as PEFT does (uniform up to 1 / sqrt(in)), alike at every layout; B with zeros.

    Args:
        params: by the names of the boxes.
        boxes: what this rank holds.
        seed: the values follow from it and the factor's name.
    """
    shapes = spec.hf_shapes()
    for box in boxes:
        if is_adapter(box.name):
            params[box.param].zero_()
        if f".{A}." in box.name:
            digest = hashlib.sha256(f"{seed} {box.name}".encode()).digest()
            drawn = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
            whole = (2 * torch.rand(shapes[box.name], generator=drawn) - 1) / shapes[box.name][1] ** 0.5
            params[box.param].copy_(whole[block(box.offset, box.size)])


class Update(NamedTuple):
    """A block of a local weight, and the rows of B and columns of A that change it.

    Attributes:
        box: the block.
        a, b: names of the local factors.
    """

    box: Box
    a: str
    columns: slice
    b: str
    rows: slice


def updates(boxes: Sequence[Box]) -> Iterator[Update]:
    """What adapters change of the weights that a rank, a worker or a folder holds.

    Args:
        boxes: of a model with adapters; each factor is a parameter of its own, which has all that its weights need.
    """
    factors = {box.name: box for box in boxes if is_adapter(box.name)}
    for box in boxes:
        a, b = (factors.get(name) for name in factor_names(box.name))
        if a is not None and b is not None:
            rows, columns = box.offset[0] - b.offset[0], box.offset[1] - a.offset[1]
            held = slice(columns, columns + box.size[1]), slice(rows, rows + box.size[0])
            yield Update(box, a.param, held[0], b.param, held[1])


@torch.no_grad()
def merge(weight_oi: torch.Tensor, a_ri: torch.Tensor, b_or: torch.Tensor, scale: float) -> None:
    """Add ``scale * B A`` to a weight in its place, in chunks of rows."""
    rows = max(CHUNK_ELEMENTS // weight_oi.shape[1], 1)
    wide_ri = a_ri.double()
    for chunk_oi, chunk_or in zip(weight_oi.split(rows), b_or.split(rows), strict=True):
        chunk_oi.copy_(chunk_oi.double() + scale * (chunk_or.double() @ wide_ri))
