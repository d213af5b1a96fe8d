"""Where two sides meet: of each tensor, the blocks that sources hold, those that destinations want, and their overlaps.

The cost is that of the cuts, not of the ranks: a block is looked at once, however many ranks hold or want it.
"""

from __future__ import annotations

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
    """Those who hold (or want) one block: numbers of shards, the box of each, and its position in the first shard."""

    shards: tuple[int, ...]
    boxes: tuple[Box, ...]
    position: int


class Meeting(NamedTuple):
    """What a source block and a destination block have in common: the ``part``-th of ``parts`` of that source block."""

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
        self._found: dict[str, list[tuple[int, int]]] = {}  # by tensor: shard, position in it
        for number, shard in enumerate(shards):
            for position, box in enumerate(shard.boxes):
                if names is None or box.name in names:
                    self._found.setdefault(box.name, []).append((number, position))
        self._turns: dict[int, list[int]] = {}
        self._members: dict[tuple[int, ...], list[tuple[int, int]]] = {}

    @property
    def names(self) -> Iterable[str]:
        """All tensors, in the order of the shards."""
        return self._found

    def holders(self, name: str) -> dict[Block, Holders]:
        """The blocks of a tensor, and who holds each."""
        entries: dict[Block, list[tuple[int, Box, int]]] = {}
        for number, position in self._found.get(name, ()):
            box = self._shards[number].boxes[position]
            entries.setdefault((box.offset, box.size), []).append((number, box, position))
        out = {}
        for block, found in entries.items():
            numbers, boxes, (position, *_) = zip(*found, strict=True)
            out[block] = Holders(numbers, boxes, position)
        return out

    def members(self, shards: tuple[int, ...]) -> list[tuple[int, int]]:
        """Every rank of some shards, with the position of its shard among them."""
        if shards not in self._members:
            self._members[shards] = [
                (rank, at) for at, number in enumerate(shards) for rank in self._shards[number].ranks
            ]
        return self._members[shards]

    def turn(self, holders: Holders) -> int:
        """The number of a block among those of its shard: the largest first, and those of a kind in a row."""
        number = holders.shards[0]
        if number not in self._turns:
            boxes = self._shards[number].boxes
            order = sorted(range(len(boxes)), key=lambda at: (-prod(boxes[at].size), _kind(boxes[at].name)))
            self._turns[number] = turns = [0] * len(boxes)
            for turn, position in enumerate(order):
                turns[position] = turn
        return self._turns[number][holders.position]


def meetings(name: str, held: Side, wanted: Side) -> Iterator[Meeting]:
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
    for source, destination, (begin, size), part, parts in overlaps:
        yield Meeting(sources[source], destinations[destination], begin, size, part, parts)


def _kind(name: str) -> str:
    """What a tensor is, whatever its layer or expert."""
    return name.translate(_NO_DIGITS)


_NO_DIGITS = str.maketrans("", "", "0123456789")


@lru_cache(maxsize=4096)  # all layers, and all experts, are cut alike
def _overlaps(
    origins: tuple[Block, ...], targets: tuple[Block, ...]
) -> tuple[list[tuple[int, int, Block, int, int]], list[int]]:
    """(origin, target, what they share, its number, their number) by origin; and how much of each target is covered."""
    covered = [0] * len(targets)
    out = []
    for at, origin in enumerate(origins):
        found = [(to, common) for to, target in enumerate(targets) if (common := _intersection(origin, target))]
        for part, (to, common) in enumerate(found):
            out.append((at, to, common, part, len(found)))
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
