"""Three ways to bring weights from training ranks to engine workers, between the same CPU processes.

Ours; whole tensors put together on one rank and broadcast to every worker, as other systems do; and bare messages of
the same bytes: from each sender to each receiver that it serves, out of and into memory that is there already.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from megappo.reshard.actor_to_rollout import TransferSpec
from megappo.reshard.boxes import Box, Shard, file_boxes
from megappo.reshard.copies import Copy, block
from megappo.reshard.plan import plan_copies
from megappo.reshard.transfer import source_block

Params = Mapping[str, torch.Tensor]
CPU = torch.device("cpu")

BARE_BYTES = 16 << 30
"""Longest bare message: that of a 7B model is one."""


def own_boxes(transfer: TransferSpec, rank: int) -> Sequence[Box]:
    """What a rank of the transfer group holds."""
    return [
        box for shard in (*transfer.sources(), *transfer.destinations()) if rank in shard.ranks for box in shard.boxes
    ]


def make_params(
    boxes: Sequence[Box], dtype: torch.dtype, values: bool, device: torch.device = CPU
) -> dict[str, torch.Tensor]:
    """Parameters that the boxes fit into: of zeros, or of numbers that follow from the place in the global tensor."""
    ends: dict[str, tuple[int, ...]] = {}
    for box in boxes:
        end = tuple(low + size for low, size in zip(box.local_offset, box.size, strict=True))
        ends[box.param] = tuple(map(max, end, ends.get(box.param, end)))
    params = {name: torch.zeros(end, dtype=dtype, device=device) for name, end in ends.items()}
    for box in boxes if values else ():
        rows = torch.arange(box.offset[0], box.offset[0] + box.size[0], device=device)
        numbers = rows * 31
        if len(box.size) == 2:
            columns = torch.arange(box.offset[1], box.offset[1] + box.size[1], device=device)
            numbers = numbers[:, None] + columns * 17
        params[box.param][block(box.local_offset, box.size)] = ((numbers + len(box.name)) % 251).to(dtype)
    return params


class GatherThenBroadcast:
    """Tensor by tensor: senders' parts to rank 0, from there to every worker, which takes its slices."""

    def __init__(self, transfer: TransferSpec, rank: int, dtype: torch.dtype, device: torch.device = CPU) -> None:
        """Collective: makes a group of rank 0 and all workers."""
        self.rank, self.dtype, self.device = rank, dtype, device
        self.receives = rank >= transfer.actor.world
        self.group = dist.new_group([0, *range(transfer.actor.world, transfer.world)])
        whole = [Shard((0,), file_boxes(transfer.model, 0))]
        self.parts: dict[str, list[Copy]] = defaultdict(list)
        for copy in plan_copies(transfer.sources(), whole):
            self.parts[copy.name].append(copy)
        self.shapes = transfer.model.hf_shapes()
        self.slices: dict[str, list[Box]] = defaultdict(list)
        for box in own_boxes(transfer, rank) if self.receives else ():
            self.slices[box.name].append(box)

    def __call__(self, params: Params) -> int:
        """Bytes that this rank received."""
        received = 0
        for name, parts in self.parts.items():
            whole = (
                torch.empty(self.shapes[name], dtype=self.dtype, device=self.device)
                if self.rank == 0 or self.receives
                else None
            )
            received += self._gather(params, parts, whole)
            if whole is None:
                continue
            dist.broadcast(whole.view(torch.uint8), 0, group=self.group)
            for box in self.slices.get(name, ()):
                params[box.param][block(box.local_offset, box.size)] = whole[block(box.offset, box.size)]
            received += whole.nbytes * self.receives
        return received

    def _gather(self, params: Params, parts: list[Copy], whole: torch.Tensor | None) -> int:
        works: list[tuple[Any, torch.Tensor, Copy]] = []
        for copy in parts:
            if copy.source == self.rank != 0:
                part = source_block(params, copy).contiguous().view(torch.uint8)
                works.append((dist.isend(part, 0), part, copy))
            elif self.rank == 0 != copy.source:
                part = torch.empty(copy.size, dtype=self.dtype, device=self.device)
                works.append((dist.irecv(part.view(torch.uint8), copy.source), part, copy))
            elif self.rank == 0 and whole is not None:
                whole[block(copy.offset, copy.size)] = source_block(params, copy)
        for work, part, copy in works:
            work.wait()
            if whole is not None and self.rank == 0:
                whole[block(copy.offset, copy.size)] = part
        return sum(part.nbytes for _, part, _ in works) if self.rank == 0 else 0


class BareMessages:
    """One message a pair, or several of :data:`BARE_BYTES`: what does not fit beside the weights is sent again."""

    def __init__(self, rank: int, part: Sequence[Copy], dtype: torch.dtype, device: torch.device = CPU) -> None:
        """Allocate all of them."""
        sizes: dict[tuple[int, int], int] = defaultdict(int)
        for copy in part:
            sizes[copy.source, copy.destination] += prod(copy.size)
        self.rank = rank
        self.messages: list[tuple[int, int, torch.Tensor]] = []
        for (source, to), size in sizes.items():
            total = size * dtype.itemsize
            buffer = torch.ones(min(total, BARE_BYTES), dtype=torch.uint8, device=device)
            for start in range(0, total, BARE_BYTES):
                self.messages.append((source, to, buffer[: total - start]))

    def __call__(self, params: Params) -> int:
        """Bytes that this rank received."""
        works: list[Any] = [
            dist.isend(buffer, to) if source == self.rank else dist.irecv(buffer, source)
            for source, to, buffer in self.messages
        ]
        for work in works:
            work.wait()
        return sum(buffer.nbytes for source, _, buffer in self.messages if source != self.rank)
