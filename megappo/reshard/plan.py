"""The plan: which block of which rank's parameter goes where. A pure function of two lists of boxes."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from math import prod

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


def make_plan(sources: Iterable[Box], destinations: Iterable[Box]) -> tuple[Copy, ...]:
    """Cover every destination box exactly once, taking each block from the least loaded rank that holds it.

    Deterministic: the same boxes give the same plan on every machine.

    Args:
        sources: boxes that hold the tensors; equal boxes on several ranks are replicas.
        destinations: boxes to fill; several ranks may want the same block.

    Raises:
        PlanError: a part of a destination box has no source, or has two different ones.
    """
    holders: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], list[Box]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for box in sources:
        holders[box.name][box.offset, box.size].append(box)
    load: dict[int, int] = defaultdict(int)
    plan: list[Copy] = []
    for wanted in destinations:
        covered = 0
        for replicas in holders[wanted.name].values():
            block = _intersection(replicas[0], wanted)
            if block is None:
                continue
            begin, size = block
            chosen = min(replicas, key=lambda box: (load[box.rank], box.rank))
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


def _intersection(a: Box, b: Box) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Global offset and size of the block that both hold, if any."""
    begin = tuple(max(x, y) for x, y in zip(a.offset, b.offset, strict=True))
    ends = (min(x + m, y + n) for x, m, y, n in zip(a.offset, a.size, b.offset, b.size, strict=True))
    size = tuple(end - start for end, start in zip(ends, begin, strict=True))
    return (begin, size) if all(extent > 0 for extent in size) else None


def _shifted(box: Box, begin: tuple[int, ...]) -> tuple[int, ...]:
    """Local offset in ``box`` of the global position ``begin``."""
    return tuple(low + x - o for low, x, o in zip(box.local_offset, begin, box.offset, strict=True))
