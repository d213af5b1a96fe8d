"""Proof that all ranks follow one plan, though none has seen more of it than its own part."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from megappo import __version__
from megappo.reshard.copies import Copy

BITS = 64


class Fingerprint(NamedTuple):
    """What a rank shows of its plan.

    Attributes:
        inputs: hash of what the plan was computed from, and of this package's version.
        sent, received: sums of the hashes of the copies that the rank sends and receives, modulo 2**64.
    """

    inputs: str
    sent: int
    received: int


def fingerprint(inputs: str, rank: int, part: Iterable[Copy]) -> Fingerprint:
    """A rank's fingerprint.

    Args:
        inputs: a text that says all that the plan depends on.
        part: the copies that ``rank`` sends or receives.
    """
    sent = received = 0
    for copy in part:
        number = int.from_bytes(hashlib.blake2b(repr(tuple(copy)).encode(), digest_size=BITS // 8).digest(), "big")
        sent += number * (copy.source == rank)
        received += number * (copy.destination == rank)
    text = f"megappo {__version__}: {inputs}"
    return Fingerprint(hashlib.sha256(text.encode()).hexdigest()[:16], sent % 2**BITS, received % 2**BITS)


def disagreement(shown: Mapping[int, Fingerprint]) -> str | None:
    """Why the ranks do not follow one plan; None if they do.

    Each copy is known to two ranks only, its sender and its receiver. If both have it, its hash is once among what is
    sent and once among what is received, so the totals are equal. If one end lacks it, or sees another block, place or
    peer, the totals differ but by a chance of 2**-64. That both have each of their copies *in the same order* follows
    from the inputs: the order of a plan is that of the parameter table, which the code's version fixes.

    Args:
        shown: the fingerprints of all ranks.
    """
    inputs: dict[str, list[int]] = {}
    for rank, mark in sorted(shown.items()):
        inputs.setdefault(mark.inputs, []).append(rank)
    if len(inputs) > 1:
        few = min(inputs.values(), key=len)
        return f"ranks {few[:8]} planned from other inputs, or with another version, than the rest of {len(shown)}"
    sent, received = (sum(getattr(mark, key) for mark in shown.values()) % 2**BITS for key in ("sent", "received"))
    if sent != received:
        return f"what {len(shown)} ranks plan to send is not what they plan to receive ({sent:016x}, {received:016x})"
    return None
