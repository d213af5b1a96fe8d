"""The plan: which block of which rank's parameter goes where. A pure function of two lists of shards.

It is the same on every rank, and each rank can work out its own part alone: the work of that depends on how the model
is cut, and on how many ranks the block's own holders serve, not on how large the cluster is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megappo.reshard.boxes import Box, Shard
from megappo.reshard.copies import Copy
from megappo.reshard.intersections import Side, intersections
from megappo.reshard.routes import Places, Route, make_route


def plan_copies(
    sources: Sequence[Shard],
    destinations: Sequence[Shard],
    places: Places = (),
    *,
    forward: bool = False,
    rank: int | None = None,
) -> Iterator[Copy]:
    """Cover every destination box exactly once, each block from one of the nearest ranks that have it.

    Args:
        sources: shards that hold the tensors; equal boxes are replicas.
        destinations: shards to fill; equal boxes are wanted by several ranks.
        places: (node, device) of each rank, where known.
        forward: a block enters a node without a holder once, and is passed on inside it.
        rank: give only the copies that this rank sends or receives, in the same order. They are found without the rest.

    Raises:
        PlanError: a part of a destination box has no source, or two boxes of one side overlap without being equal. With
            ``rank``, only tensors that concern it are looked at.
    """
    names = None
    if rank is not None:
        own = (shard for shard in (*sources, *destinations) if rank in shard.ranks)
        names = {box.name for shard in own for box in shard.boxes}
    held, wanted = Side(sources, names), Side(destinations, names)
    routes: dict[tuple[tuple[int, ...], tuple[int, ...]], Route | None] = {}
    for name in wanted.names:
        for source, destination, begin, size, part, parts in intersections(name, held, wanted):
            key = source.shards, destination.shards
            givers, takers = held.members(key[0]), wanted.members(key[1])
            if key not in routes:
                ends = [giver for giver, _ in givers], [taker for taker, _ in takers]
                concerned = rank is None or rank in ends[0] or rank in ends[1]
                routes[key] = make_route(*ends, places, forward=forward, rank=rank) if concerned else None
            route = routes[key]
            if route is None:
                continue
            given = [(box.param, _shifted(box, begin)) for box in source.boxes]
            taken = [(box.param, _shifted(box, begin)) for box in destination.boxes]
            for giver, taker, wave in route.deliveries(held.turn(source, name), part, parts):
                from_, out_of = takers[giver] if wave else givers[giver]
                to, into = takers[taker]
                if rank is None or rank in (from_, to):
                    block = taken[out_of] if wave else given[out_of]
                    yield Copy(from_, *block, to, *taken[into], size, name, wave)


def _shifted(box: Box, begin: tuple[int, ...]) -> tuple[int, ...]:
    """Local offset in ``box`` of the global position ``begin``."""
    lead = len(box.local_offset) - len(begin)
    inner = (low + x - o for low, x, o in zip(box.local_offset[lead:], begin, box.offset, strict=True))
    return *box.local_offset[:lead], *inner
