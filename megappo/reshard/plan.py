"""The plan: which block of which rank's parameter goes where. A pure function of two lists of boxes."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from itertools import combinations
from math import prod
from typing import Any

from megappo.reshard.boxes import Box


class PlanError(ValueError):
    """The sources do not cover a destination exactly once."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One block to move, in elements: ``size`` at ``source_offset`` of a source rank's parameter to a destination's."""

    source: int
    source_param: str
    source_offset: tuple[int, ...]
    destination: int
    param: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    name: str  # the global tensor, for messages

    @property
    def elements(self) -> int:
        """Number of elements moved."""
        return prod(self.size)


def make_plan(
    sources: Iterable[Box], destinations: Iterable[Box], distance: Callable[[int, int], int] = lambda source, to: 0
) -> tuple[Copy, ...]:
    """Cover every destination box exactly once, each block from the nearest, then least loaded, rank that has it.

    Deterministic: the same boxes give the same plan on every machine.

    Args:
        sources: boxes that hold the tensors; equal boxes on several ranks are replicas.
        destinations: boxes to fill; several ranks may want the same block.
        distance: between a source and a destination rank; smaller is nearer.

    Raises:
        PlanError: a part of a destination box has no source, or two sources overlap without being equal.
    """
    holders: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], list[Box]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for box in sources:
        holders[box.name][box.offset, box.size].append(box)
    _check_disjoint(holders.values())
    load: dict[int, int] = defaultdict(int)
    plan: list[Copy] = []
    for wanted in destinations:
        covered = 0
        for replicas in holders[wanted.name].values():
            block = _intersection(replicas[0], wanted)
            if block is None:
                continue
            begin, size = block
            chosen = min(replicas, key=lambda box: (distance(box.rank, wanted.rank), load[box.rank], box.rank))
            copy = Copy(
                source=chosen.rank,
                source_param=chosen.param,
                source_offset=_shifted(chosen, begin),
                destination=wanted.rank,
                param=wanted.param,
                offset=_shifted(wanted, begin),
                size=size,
                name=wanted.name,
            )
            load[chosen.rank] += copy.elements
            covered += copy.elements
            plan.append(copy)
        if covered != prod(wanted.size):
            raise PlanError(
                f"{wanted.name}: rank {wanted.rank} wants {prod(wanted.size)} elements at {wanted.offset}, "
                f"the sources hold {covered} of them"
            )
    return tuple(plan)


def plan_hash(plan: tuple[Copy, ...]) -> str:
    """A fingerprint of the plan, for ranks to compare before they send anything."""
    digest = hashlib.sha256()
    for copy in plan:
        digest.update(repr(astuple(copy)).encode())
    return digest.hexdigest()[:16]


def _check_disjoint(holders: Iterable[Mapping[Any, list[Box]]]) -> None:
    """A gap and an overlap of the same size would pass for full cover."""
    for blocks in holders:
        for (a, *_), (b, *_) in combinations(blocks.values(), 2):
            if _intersection(a, b):
                raise PlanError(
                    f"{a.name}: the source boxes of ranks {a.rank} (at {a.offset}, size {a.size}) and "
                    f"{b.rank} (at {b.offset}, size {b.size}) overlap without being equal"
                )


def _intersection(a: Box, b: Box) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Global offset and size of the block that both hold, if any."""
    begin = tuple(max(x, y) for x, y in zip(a.offset, b.offset, strict=True))
    ends = (min(x + m, y + n) for x, m, y, n in zip(a.offset, a.size, b.offset, b.size, strict=True))
    size = tuple(end - start for end, start in zip(ends, begin, strict=True))
    return (begin, size) if all(extent > 0 for extent in size) else None


def _shifted(box: Box, begin: tuple[int, ...]) -> tuple[int, ...]:
    """Local offset in ``box`` of the global position ``begin``."""
    return tuple(low + x - o for low, x, o in zip(box.local_offset, begin, box.offset, strict=True))


@dataclass(frozen=True, slots=True)
class Message:
    """Blocks that travel together from one rank to another, packed one after the other in this order."""

    source: int
    destination: int
    copies: tuple[Copy, ...]

    @property
    def elements(self) -> int:
        """Number of elements carried."""
        return sum(copy.elements for copy in self.copies)


def make_messages(plan: Iterable[Copy], bucket_elements: int) -> tuple[Message, ...]:
    """Group the plan into messages of at most ``bucket_elements``, in one order for all ranks.

    A block larger than a bucket is cut along its first axis (a single row is never cut). Every rank works through its
    own messages in this order, as sender or receiver: the earliest message that is not done then always has both ends
    ready, so bounded buffers cannot deadlock. Messages of different pairs alternate, so that all links are busy.
    """
    pairs: dict[tuple[int, int], list[list[Copy]]] = defaultdict(lambda: [[]])
    filled: dict[tuple[int, int], int] = defaultdict(int)
    for copy in plan:
        pair = copy.source, copy.destination
        for piece in _cut(copy, bucket_elements):
            if filled[pair] and filled[pair] + piece.elements > bucket_elements:
                pairs[pair].append([])
                filled[pair] = 0
            pairs[pair][-1].append(piece)
            filled[pair] += piece.elements
    out: list[Message] = []
    for turn in range(max((len(buckets) for buckets in pairs.values()), default=0)):
        for (source, destination), buckets in sorted(pairs.items()):
            if turn < len(buckets):
                out.append(Message(source, destination, tuple(buckets[turn])))
    return tuple(out)


def _cut(copy: Copy, bucket_elements: int) -> Iterator[Copy]:
    rows = max(bucket_elements * copy.size[0] // copy.elements, 1)
    for start in range(0, copy.size[0], rows):
        yield replace(
            copy,
            source_offset=(copy.source_offset[0] + start, *copy.source_offset[1:]),
            offset=(copy.offset[0] + start, *copy.offset[1:]),
            size=(min(rows, copy.size[0] - start), *copy.size[1:]),
        )
