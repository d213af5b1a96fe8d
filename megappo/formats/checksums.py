"""CRC-32 of bytes that several have summed, each a part."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

_POLYNOMIAL = 0xEDB88320
"""That of CRC-32. As in its checksums, the highest bit is the coefficient of x^0."""
_ONE, _X = 1 << 31, 1 << 30


def joined(parts: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of parts one behind the other, each given as its own CRC-32 and its number of bytes."""
    checksum = 0
    for part, num_bytes in parts:
        checksum = _product(_behind(num_bytes), checksum) ^ part
    return checksum


@cache
def _behind(num_bytes: int) -> int:
    """What a checksum is multiplied by as so many bytes come behind it: x^(8 num_bytes)."""
    power, square, left = _ONE, _X, 8 * num_bytes
    while left:
        if left & 1:
            power = _product(square, power)
        square, left = _product(square, square), left >> 1
    return power


def _product(a: int, b: int) -> int:
    """Of polynomials of which only the remainder counts."""
    out = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            out ^= b
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return out
