"""The plan cut into messages of bounded size, in an order in which everybody can work through their own."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from megappo.reshard.copies import Copy, cut

WORTH_FILLING = 16
"""A block is cut to fill a message of which a sixteenth is left: for less, a further piece costs more than it saves."""


@dataclass(frozen=True, slots=True)
class Message:
    """Blocks that travel together from one rank to another, packed one after the other in this order.

    Attributes:
        wave: 0 from a rank that holds the weights; 1 from one that passes on what came in messages before.
        phase: of the transfer; each is complete before the next begins.
    """

    source: int
    destination: int
    copies: tuple[Copy, ...]
    wave: int = 0
    phase: int = 0

    @property
    def elements(self) -> int:
        """Number of elements carried."""
        return sum(copy.elements for copy in self.copies)


def make_messages(
    plan: Iterable[Copy],
    bucket_elements: int,
    direct_elements: int | None = None,
    phase_of: Callable[[Copy], int] = lambda _: 0,
    may_be_direct: Callable[[Copy], bool] = lambda _: True,
) -> tuple[Message, ...]:
    """Group the plan into messages of at most ``bucket_elements``, in one order for all ranks.

    A block that does not fit into what is left of a message is cut along its first axis (a single row is never cut),
    unless little is left. Blocks of ``direct_elements`` or more travel alone, so that they need not be packed.

    Every rank works through its own messages in this order, as sender or receiver: the earliest message that is not
    done then always has both ends ready, so bounded buffers cannot deadlock. Messages of different pairs alternate, so
    that all links are busy: those whose ranks have one exclusive or are neighbours in the order, and have no rank in
    common.

    The first wave comes before the second. A rank that passes blocks on must have *unpacked* all its messages of the
    first wave before it packs one of the second; as it then waits for nothing but the first wave, which waits for
    nothing, this cannot deadlock either.

    From one rank's part of the plan come that rank's messages, in the same order.

    Args:
        phase_of: the phase in which a copy is made; its messages come after all those of earlier phases.
        may_be_direct: False for copies between ranks whose transport packs everything.
    """
    pairs: dict[tuple[int, int, int, int], list[list[Copy]]] = defaultdict(list)
    filling: dict[tuple[int, int, int, int], list[Copy]] = {}
    filled: dict[tuple[int, int, int, int], int] = defaultdict(int)
    for copy in plan:
        pair = phase_of(copy), copy.wave, copy.source, copy.destination
        least_direct = direct_elements if direct_elements is not None and may_be_direct(copy) else math.inf
        room = bucket_elements - filled[pair]
        fills = copy.elements < least_direct and room * WORTH_FILLING >= bucket_elements
        for piece in cut(copy, bucket_elements, room if fills else None):
            elements = piece.elements
            if elements >= least_direct:
                pairs[pair].append([piece])
                continue
            if pair not in filling or filled[pair] + elements > bucket_elements:
                filling[pair] = []
                pairs[pair].append(filling[pair])
                filled[pair] = 0
            filling[pair].append(piece)
            filled[pair] += elements
    numbered = (
        ((phase, wave, turn, source ^ destination, source), bucket)
        for (phase, wave, source, destination), buckets in pairs.items()
        for turn, bucket in enumerate(buckets)
    )
    return tuple(
        Message(source, source ^ other, tuple(bucket), wave, phase)
        for (phase, wave, _, other, source), bucket in sorted(numbered, key=lambda entry: entry[0])
    )
