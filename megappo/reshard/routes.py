"""Who sends a block to whom: a rule in closed form, so that both ends find it alone.

The ranks that hold a block are equals but for where they are. A rank that wants it is served

1. from its own device, if a holder is there;
2. else from its own node, if a holder is there;
3. else from another node. The block then enters the node once, at one of those that want it, which passes it on to the
   others: the second wave.

Among equals, ranks take turns. Every tensor has a turn t: its number among the tensors of its shard, kinds (all layers'
query weights, say) in a row and the largest first. Of one tensor, the ranks of a shard hold P parts for G nodes (or
wanters) elsewhere; delivery g of part p has the number (t P + p) G + g, and the numbers go round the holders. All
tensors of a kind are cut alike, so the deliveries of a kind have numbers without a gap: none of its holders makes more
than one beyond another. (Where G differs between parts, as engines lie unevenly on nodes, gaps are possible.) Nobody
needs to know what others were asked for: there is no running load.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

Places = Sequence[tuple[str, str]]
"""(node, device) of each rank; empty if unknown."""

DEVICE, NODE, NETWORK = 0, 1, 2
"""Distance between two ranks: on one device, on one node, on different nodes."""


def place(places: Places, rank: int) -> tuple[str | int, str | int]:
    """(node, device) of a rank. If places are unknown, every rank is a node of its own."""
    return places[rank] if places else (rank, rank)


def distance(places: Places, source: int, destination: int) -> int:
    """How far apart two ranks are."""
    (node, device), (to_node, to_device) = place(places, source), place(places, destination)
    return NETWORK if node != to_node else NODE if device != to_device else DEVICE


class Delivery(NamedTuple):
    """One transfer of a block. Holders and wanters are given as positions in the route's lists."""

    holder: int  # who sends; in the second wave, a wanter that has it by then
    wanter: int
    wave: int


class Route(NamedTuple):
    """How blocks get from certain holders to certain wanters, but for whose turn it is.

    Attributes:
        near: (wanter, holders on its device or else on its node), for wanters that have such a holder.
        far: (number of the group, wanters) for each node without a holder (or each wanter, if nothing is passed on).
        groups: number of groups in all.
        holders: number of holders.
    """

    near: tuple[tuple[int, tuple[int, ...]], ...]
    far: tuple[tuple[int, tuple[int, ...]], ...]
    groups: int
    holders: int

    def deliveries(self, turn: int, part: int, parts: int) -> Iterator[Delivery]:
        """Every wanter once, of the ``part``-th of ``parts`` that the holders have of a tensor."""
        number = (turn * parts + part) * self.groups
        for wanter, holders in self.near:
            yield Delivery(holders[(turn + part + wanter) % len(holders)], wanter, 0)
        for group, wanters in self.far:
            gateway = wanters[(turn + part) % len(wanters)]
            yield Delivery((number + group) % self.holders, gateway, 0)
            for wanter in wanters:
                if wanter != gateway:
                    yield Delivery(gateway, wanter, 1)


def make_route(
    holders: Sequence[int], wanters: Sequence[int], places: Places, *, forward: bool, rank: int | None = None
) -> Route:
    """Lay out the route between two lists of ranks.

    Args:
        forward: nodes without a holder receive a block once and pass it on; else each wanter gets it from afar.
        rank: keep only what may concern this rank (the numbers stay those of the whole route).
    """
    by_node: dict[str | int, list[int]] = {}
    by_device: dict[tuple[str | int, str | int], list[int]] = {}
    for at, holder in enumerate(holders):
        here = place(places, holder)
        by_node.setdefault(here[0], []).append(at)
        by_device.setdefault(here, []).append(at)
    near: list[tuple[int, tuple[int, ...]]] = []
    far: dict[object, list[int]] = {}
    for at, wanter in enumerate(wanters):
        here = place(places, wanter)
        if closest := by_device.get(here) or by_node.get(here[0]):
            near.append((at, tuple(closest)))
        else:
            far.setdefault(here[0] if forward else at, []).append(at)
    groups = [(number, tuple(group)) for number, group in enumerate(far.values())]
    if rank is not None and rank not in holders:
        near = [(at, closest) for at, closest in near if wanters[at] == rank]
        groups = [(number, group) for number, group in groups if any(wanters[at] == rank for at in group)]
    return Route(tuple(near), tuple(groups), len(far), len(holders))
