"""A plan for people: bytes by link and by rank, planned against the least there can be, and how long it should take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from megappo.reshard.boxes import Shard
from megappo.reshard.copies import Copy
from megappo.reshard.intersections import Side, intersections
from megappo.reshard.routes import DEVICE, NETWORK, NODE, Places, distance, place

LINKS = {DEVICE: "on the device", NODE: "inside nodes", NETWORK: "between nodes"}


@dataclass(frozen=True)
class Speeds:
    """What one rank can send, and at the same time receive, over each kind of link, in bytes per second.

    The defaults are what was measured between H200s (copies on a device read and write, so half of its memory's speed;
    NCCL point-to-point over NVLink) and 90% of a 400 Gbit/s network port for each device.
    """

    device: float = 2.1e12
    node: float = 367e9
    network: float = 45e9

    def of(self, link: int) -> float:
        """Speed of ``DEVICE``, ``NODE`` or ``NETWORK``."""
        return {DEVICE: self.device, NODE: self.node, NETWORK: self.network}[link]


@dataclass(frozen=True)
class Explanation:
    """What a plan moves, in bytes.

    Attributes:
        planned, least: by link; the least that any plan can move there, given what must move at all: what no holder on
            the device has, and what no holder on the node has, once a node.
        sent, received: by rank, off its device.
        least_received: by rank: what it wants and its device does not hold.
        seconds: predicted time of the first and of the second wave: that of the busiest end of the busiest link.
    """

    planned: dict[int, int]
    least: dict[int, int]
    sent: dict[int, int]
    received: dict[int, int]
    least_received: dict[int, int]
    seconds: tuple[float, float]

    def lines(self) -> Iterator[str]:
        """The explanation as text."""
        yield f"{'':14}  {'planned':>12}  {'least':>12}"
        for link, name in LINKS.items():
            yield f"{name:14}  {_size(self.planned[link]):>12}  {_size(self.least[link]):>12}"
        for what, ranks in (("sends", self.sent), ("receives", self.received)):
            rank = max(ranks, key=ranks.__getitem__, default=0)
            yield f"the busiest of {len(ranks)} ranks, {rank}, {what} {_size(ranks.get(rank, 0))}"
        excess = sum(self.received.values()) / max(sum(self.least_received.values()), 1)
        yield f"received / least: {excess:.4f}" if any(self.received.values()) else "nothing leaves a device"
        first, second = self.seconds
        yield f"predicted time: {first + second:.3g} s" + (f", {second:.2g} s of it to pass on" if second else "")


def explain(
    plan: Iterable[Copy],
    sources: Sequence[Shard],
    destinations: Sequence[Shard],
    places: Places,
    *,
    item_size: int,
    speeds: Speeds | None = None,
) -> Explanation:
    """Add up a plan. The copies are looked at once, one at a time, so ``plan`` may be an iterator.

    Links are taken to be independent of each other, ends to send and receive at once, and networks not to be crowded;
    latencies are left out.

    Args:
        sources, destinations, places: what the plan was made from.
        item_size: bytes of an element.
    """
    speeds = speeds or Speeds()
    planned = dict.fromkeys(LINKS, 0)
    sent: dict[tuple[int, int, int], int] = {}
    received: dict[tuple[int, int, int], int] = {}
    for copy in plan:
        link, size = distance(places, copy.source, copy.destination), copy.elements * item_size
        planned[link] += size
        for ends, rank in ((sent, copy.source), (received, copy.destination)):
            ends[copy.wave, link, rank] = ends.get((copy.wave, link, rank), 0) + size
    least, least_received = _least(sources, destinations, places, item_size)
    seconds = [0.0, 0.0]
    for ends in (sent, received):
        for (wave, link, _), size in ends.items():
            seconds[wave] = max(seconds[wave], size / speeds.of(link))
    return Explanation(
        planned, least, _off_device(sent), _off_device(received), least_received, (seconds[0], seconds[1])
    )


def _least(
    sources: Sequence[Shard], destinations: Sequence[Shard], places: Places, item_size: int
) -> tuple[dict[int, int], dict[int, int]]:
    """The least bytes by link and by receiving rank, from what is where alone."""
    held, wanted = Side(sources), Side(destinations)
    sizes: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    for name in wanted.names:
        for shared in intersections(name, held, wanted):
            key = shared.source.shards, shared.destination.shards
            sizes[key] = sizes.get(key, 0) + prod(shared.size) * item_size
    least, least_received = dict.fromkeys(LINKS, 0), dict.fromkeys((r for s in destinations for r in s.ranks), 0)
    for (holders, wanters), size in sizes.items():
        devices = {place(places, rank) for rank, _ in held.members(holders)}
        nodes = {node for node, _ in devices}
        for rank, _ in wanted.members(wanters):
            here = place(places, rank)
            link = DEVICE if here in devices else NODE if here[0] in nodes else NETWORK
            least[link] += size
            least_received[rank] += 0 if link == DEVICE else size
            nodes.add(here[0])  # the others of the node have it from here
    return least, least_received


def _off_device(ends: dict[tuple[int, int, int], int]) -> dict[int, int]:
    out: dict[int, int] = {}
    for (_, link, rank), size in ends.items():
        out[rank] = out.get(rank, 0) + (size if link != DEVICE else 0)
    return out


def _size(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.4g} {unit}"
        size /= 1000
    return f"{size:.4g} TB"
