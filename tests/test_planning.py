"""Planning for clusters of thousands of ranks stays within seconds and little memory, on one core."""

from __future__ import annotations

import time
import tracemalloc
from math import prod

import pytest

from megappo.bench.planning import CLUSTERS, dense_405b, mixture_1t
from megappo.reshard.plan import plan_copies

SLACK = 2  # machines differ

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("own_heap")]


@pytest.mark.parametrize(("name", "limit_s"), [("405b", 1.0), ("1t-moe", 3.0)])
def test_a_rank_finds_its_own_part_quickly(name: str, limit_s: float) -> None:
    transfer = CLUSTERS[name]()
    for rank in (0, transfer.actor.world - 1, transfer.actor.world, transfer.world - 1):
        began = time.thread_time()
        part = transfer.part(rank)
        assert time.thread_time() - began < SLACK * limit_s
        assert all(rank in (copy.source, copy.destination) for copy in part)
        received = sum(copy.elements for copy in part if copy.destination == rank)
        (shard,) = [shard for shard in transfer.destinations() if rank in shard.ranks] or [None]
        assert received == (sum(prod(box.size) for box in shard.boxes) if shard else 0)


def test_the_whole_plan_of_405b_is_quick() -> None:
    transfer = dense_405b()
    began = time.thread_time()
    sides = transfer.sources(), transfer.destinations()
    elements = sum(copy.elements for copy in plan_copies(*sides, transfer.places, forward=True))
    assert time.thread_time() - began < SLACK * 20
    norms = (2 * 126 + 1) * 16384  # every worker has all of these
    assert elements == 64 * (transfer.model.num_parameters() + 7 * norms)


def test_a_part_takes_little_memory() -> None:
    transfer = mixture_1t()
    tracemalloc.start()
    try:
        transfer.part(transfer.world - 1)
        assert tracemalloc.get_traced_memory()[1] < 2 << 30
    finally:
        tracemalloc.stop()
