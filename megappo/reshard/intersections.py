"""Where two sides meet: of each tensor, the blocks that sources hold, those that destinations want, and their overlaps.

The cost is that of the cuts, not of the ranks: a block is looked at once, however many ranks hold or want it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import combinations
from math import prod
from typing import NamedTuple

from megappo.reshard.boxes import Box, Shard


class PlanError(ValueError):
    """The sources do not cover a destination exactly once."""


Block = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and size in a global tensor."""


class Holders(NamedTuple):
    """Those who hold (or want) one block: numbers of shards, and the box of each."""

    shards: tuple[int, ...]
    boxes: tuple[Box, ...]


class Intersection(NamedTuple):
    """What a source block and a destination block have in common.

    It is the ``part``-th of ``parts`` that the same source shards have of this tensor.
    """

    source: Holders
    destination: Holders
    begin: tuple[int, ...]
    size: tuple[int, ...]
    part: int
    parts: int


class Side:
    """The shards of all sources, or of all destinations, by tensor."""

    def __init__(self, shards: Sequence[Shard], names: Collection[str] | None = None) -> None:
        """Sort them.

        Args:
            names: the tensors to look at; None for all.
        """
        self._shards = shards
        self._found: dict[str, list[tuple[int, Box]]] = {}  # by tensor: shard, box
        for number, shard in enumerate(shards):
            for box in shard.boxes:
                if names is None or box.name in names:
                    self._found.setdefault(box.name, []).append((number, box))
        self._turns: dict[int, dict[str, int]] = {}
        self._members: dict[tuple[int, ...], list[tuple[int, int]]] = {}

    @property
    def names(self) -> Iterable[str]:
        """All tensors, in the order of the shards."""
        return self._found

    def holders(self, name: str) -> dict[Block, Holders]:
        """The blocks of a tensor, and who holds each."""
        entries: dict[Block, list[tuple[int, Box]]] = {}
        for number, box in self._found.get(name, ()):
            entries.setdefault((box.offset, box.size), []).append((number, box))
        out = {}
        for block, found in entries.items():
            numbers, boxes = zip(*found, strict=True)
            out[block] = Holders(numbers, boxes)
        return out

    def members(self, shards: tuple[int, ...]) -> list[tuple[int, int]]:
        """Every rank of some shards, with the position of its shard among them."""
        if shards not in self._members:
            self._members[shards] = [
                (rank, at) for at, number in enumerate(shards) for rank in self._shards[number].ranks
            ]
        return self._members[shards]

    def turn(self, holders: Holders, name: str) -> int:
        """The number of a tensor among those of a shard: kinds with the largest blocks first, each kind in a row."""
        number = holders.shards[0]
        if number not in self._turns:
            largest: dict[str, int] = {}
            kinds: dict[str, str] = {}
            for box in self._shards[number].boxes:
                kind = kinds[box.name] = _kind(box.name)
                largest[kind] = max(prod(box.size), largest.get(kind, 0))
            order = sorted(kinds, key=lambda tensor: (-largest[kinds[tensor]], kinds[tensor]))
            self._turns[number] = {tensor: turn for turn, tensor in enumerate(order)}
        return self._turns[number][name]


def intersections(name: str, held: Side, wanted: Side) -> Iterator[Intersection]:
    """Cover all blocks of a tensor that are wanted.

    Raises:
        PlanError: a part of one has no source, or blocks of one side overlap without being equal.
    """
    origins, targets = held.holders(name), wanted.holders(name)
    for what, side, blocks in (("source", held, origins), ("destination", wanted, targets)):
        if clash := _overlap(tuple(blocks)):
            ranks, boxes = zip(*((side.members(blocks[block].shards)[0][0], block) for block in clash), strict=True)
            raise PlanError(
                f"{name}: the {what} boxes of ranks {ranks[0]} (at {boxes[0][0]}, size {boxes[0][1]}) and "
                f"{ranks[1]} (at {boxes[1][0]}, size {boxes[1][1]}) overlap without being equal"
            )
    overlaps, covered = _overlaps(tuple(origins), tuple(targets))
    for (block, holders), elements in zip(targets.items(), covered, strict=True):
        if elements != prod(block[1]):
            raise PlanError(
                f"{name}: rank {wanted.members(holders.shards)[0][0]} wants {prod(block[1])} elements at {block[0]}, "
                f"the sources hold {elements} of them"
            )
    sources, destinations = list(origins.values()), list(targets.values())
    parts = Counter(sources[origin].shards for origin, _, _ in overlaps)
    met: Counter[tuple[int, ...]] = Counter()
    for origin, target, (begin, size) in overlaps:
        source = sources[origin]
        yield Intersection(source, destinations[target], begin, size, met[source.shards], parts[source.shards])
        met[source.shards] += 1


def _kind(name: str) -> str:
    """What a tensor is, whatever its layer or expert."""
    return name.translate(_NO_DIGITS)


_NO_DIGITS = str.maketrans("", "", "0123456789")


@lru_cache(maxsize=4096)  # all layers, and all experts, are cut alike
def _overlaps(origins: tuple[Block, ...], targets: tuple[Block, ...]) -> tuple[list[tuple[int, int, Block]], list[int]]:
    """(origin, target, what they share) by origin; and how much of each target is covered."""
    covered = [0] * len(targets)
    out = []
    for at, origin in enumerate(origins):
        for to, target in enumerate(targets):
            if common := _intersection(origin, target):
                out.append((at, to, common))
                covered[to] += prod(common[1])
    return out, covered


@lru_cache(maxsize=4096)
def _overlap(blocks: tuple[Block, ...]) -> tuple[Block, Block] | None:
    """Two that overlap, if any: a gap and an overlap of the same size would pass for full cover."""
    return next(((a, b) for a, b in combinations(blocks, 2) if _intersection(a, b)), None)


def _intersection(a: Block, b: Block) -> Block | None:
    """The block that both hold, if any."""
    begin = tuple(map(max, a[0], b[0]))
    ends = (min(x + m, y + n) for x, m, y, n in zip(*a, *b, strict=True))
    size = tuple(end - start for end, start in zip(ends, begin, strict=True))
    return (begin, size) if all(extent > 0 for extent in size) else None
