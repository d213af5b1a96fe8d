"""Each rank's share of an optimizer's state, as blocks of tensors of the model's own shapes.

Megatron's distributed optimizer gives every data-parallel rank a range of all parameters one after the other, so that
the cuts go through the middle of tensors. A range of a flattened tensor is a few blocks of it, which a checkpoint can
hold as they are: each rank writes what it has, and reads what it needs, whoever wrote it. Megatron's own way is to
gather all of it on every rank, or on one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch

from megappo.formats.stored import strides
from megappo.models import megatron_cpu

megatron_cpu.install()

from megatron.core.dist_checkpointing import ShardedTensor  # noqa: E402
from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory  # noqa: E402

Block = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and size."""

KEPT = ("param", "exp_avg", "exp_avg_sq")
"""Of every parameter, in float32: its value and Adam's moments. Adam's step is one for all, and kept with the rest."""


def state_blocks(optimizer: Any, weights: Mapping[str, Any]) -> dict[str, ShardedTensor]:
    """Entries of a checkpoint, whose values are those of the optimizer itself: what is loaded into them is there.

    Keys and shapes on disk are those of Megatron's format ``fully_reshardable``.

    Args:
        optimizer: one of Megatron's distributed optimizers, whose moments are there.
        weights: checkpoint entries of the model, by parameter.
    """
    kinds = (ShardedTensor, ShardedTensorFactory)  # other entries are of no parameter
    entries = {entry.data: entry for entry in weights.values() if isinstance(entry, kinds)}
    blocks = [
        block
        for bucket in _buckets(optimizer)
        for param, ranges in bucket["param_map"].items()
        for block in _blocks_of(optimizer, param, ranges["param"], _pieces(entries[param]))
    ]
    return {str(number): block for number, block in enumerate(blocks)}


def range_blocks(begin: int, end: int, shape: Sequence[int]) -> Iterator[Block]:
    """Cut a range of a flattened tensor into blocks of the tensor, in the order of their elements."""
    if len(shape) == 1:
        yield (begin,), (end - begin,)
        return
    row = prod(shape[1:])
    first, last = -(-begin // row), end // row  # whole rows
    if first > last:  # all of it is within one
        yield from _within(last, begin, end, shape)
        return
    if begin < first * row:
        yield from _within(first - 1, begin, first * row, shape)
    if first < last:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    if last * row < end:
        yield from _within(last, last * row, end, shape)


def _within(row: int, begin: int, end: int, shape: Sequence[int]) -> Iterator[Block]:
    start = row * prod(shape[1:])
    for offset, size in range_blocks(begin - start, end - start, shape[1:]):
        yield (row, *offset), (1, *size)


def _buckets(optimizer: Any) -> Iterator[Any]:
    for buffer in optimizer.gbuf_ranges:
        for buckets in buffer.values():
            yield from buckets


def _pieces(entry: ShardedTensor | ShardedTensorFactory) -> list[tuple[int, ShardedTensor]]:
    """The parts of a parameter that a checkpoint has in places of their own (gate and up, say), each with the number of
    elements of the parameter that are before it."""
    if isinstance(entry, ShardedTensor):
        return [(0, entry)]
    pieces = list(nested_values(entry.build()))
    return [(piece.data.storage_offset() - entry.data.storage_offset(), piece) for piece in pieces]


def _blocks_of(
    optimizer: Any, param: torch.Tensor, held: Any, pieces: Sequence[tuple[int, ShardedTensor]]
) -> Iterator[ShardedTensor]:
    """Those of one parameter, of whose elements this rank has the range ``held``."""
    state = optimizer._get_main_param_and_optimizer_states(param)
    for before, piece in pieces:
        begin, end = (min(max(at - before, 0), piece.data.numel()) for at in (held.start, held.end))
        for offset, size in range_blocks(begin, end, piece.local_shape) if begin < end else ():
            inner = sum(o * step for o, step in zip(offset, strides(piece.local_shape), strict=True))
            start = before + inner - held.start
            for name in KEPT:
                yield _entry(name, piece, state[name].detach()[start : start + prod(size)], offset, size)


def _entry(
    name: str, piece: ShardedTensor, values: torch.Tensor, offset: tuple[int, ...], size: tuple[int, ...]
) -> ShardedTensor:
    stacked = piece.prepend_axis_num  # axes that count layers
    shape = (*[1] * stacked, *size)
    place = zip(piece.global_offset, (*[0] * stacked, *offset), strict=True)
    return ShardedTensor(
        key=f"optimizer.state.{name}.{piece.key}",
        data=values.view(shape),
        dtype=values.dtype,
        local_shape=shape,
        global_shape=piece.global_shape,
        global_offset=tuple(a + b for a, b in place),
        axis_fragmentations=None,  # blocks are of many sizes
        replica_id=(*piece.replica_id[:2], 0),  # no other data-parallel rank has it
        allow_shape_mismatch=piece.allow_shape_mismatch,
    )
