"""The actor's update on one device and on more: by data parallelism and by tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch.distributed as dist

from megappo.bench import training
from megappo.bench.ranks import on_ranks
from megappo.config import PPOConfig
from megappo.data import batch
from megappo.layout.mesh import Layout
from megappo.models.spec import read_model_spec

GPU_WORK = (32, 512)
CPU_WORK = (8, 64)
"""Sequences of one data-parallel rank's mini-batch, and the tokens of each."""


def measure(model: Path, world: int, *, on_cuda: bool) -> list[dict[str, float | str]]:
    """One row a layout: the median of five updates, optimizer included, and the share of perfect scaling."""
    work = GPU_WORK if on_cuda else CPU_WORK
    rows: list[dict[str, float | str]] = []
    for layout in layouts(world, read_model_spec(model).num_kv_heads):
        sequences = work[0] * layout.dp
        seconds = max(on_ranks(layout.world, seconds_of_update, str(model), layout, sequences, work[1]))
        speed = sequences * work[1] / seconds
        row: dict[str, float | str] = {"layout": layout.describe() if layout.world > 1 else "one device"}
        row |= {"devices": layout.world, "sequences": sequences, "tokens/s": speed}
        rows.append(row | {"of perfect": speed / layout.world / float(rows[0]["tokens/s"] if rows else speed)})
    return rows


def layouts(world: int, kv_heads: int) -> Iterator[Layout]:
    """One device; then 2, 4, ... by data parallelism, with more sequences; then by tensor parallelism, with as many."""
    sizes = [size for size in (2, 4, 8) if size <= world]
    yield Layout()
    yield from (Layout(dp=size) for size in sizes)
    yield from (Layout(tp=size, sequence_parallel=True) for size in sizes if kv_heads % size == 0)


def seconds_of_update(model: str, layout: Layout, sequences: int, length: int) -> float:
    """On every rank of the layout."""
    from megappo.workers.objectives import ActorObjective
    from megappo.workers.settings import MiniBatch, Totals

    role = training.make_role(Path(model), sequences // layout.dp * length, layout=layout)
    rows = training.make_rows(sequences, 1, length, vocab_size=role.spec.vocab_size)
    totals = Totals(sequences, int(batch.lengths(rows, "response_ids").sum()))
    own = np.arange(sequences)[layout.coordinates(dist.get_rank())["dp"] :: layout.dp]
    ppo = PPOConfig(mini_batch=sequences, actor_lr=1e-6)
    return training.median(lambda: role.update(rows, [MiniBatch(own, totals)], ActorObjective(ppo, 1.0), 1e-6))
