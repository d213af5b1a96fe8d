"""Which rows go where: mini-batches, shares of data-parallel ranks, micro-batches under a token budget.

Pure and deterministic: every rank that computes one of these from the same lengths gets the same answer.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def mini_batches(num_rows: int, size: int, seed: int | str | None = None) -> list[list[int]]:
    """Split rows 0 .. num_rows-1 into mini-batches of `size` rows; the last may be smaller, no row is dropped.

    Args:
        num_rows: >= 0.
        size: >= 1, rows a mini-batch, over all ranks.
        seed: shuffles the rows (the same seed, the same order); None keeps them in order. A string such as
            f"{seed}/{step}/{epoch}" gives every epoch of every step its own shuffle, with nothing to keep between them.

    Raises:
        ValueError: if size < 1.
    """
    if size < 1:
        raise ValueError(f"size is {size}; a mini-batch needs at least 1 row")
    rows = list(range(num_rows))
    if seed is not None:
        random.Random(seed).shuffle(rows)
    return [rows[start : start + size] for start in range(0, num_rows, size)]


def balanced_partition(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Share rows among `parts` so that the sums of their lengths are close.

    Longest processing time first: each row, longest first, goes to the part with the least so far (Graham, "Bounds on
    Multiprocessing Timing Anomalies", 1969: the largest sum is at most 4/3 - 1/(3 parts) of the best possible). Equal
    sums go to the part with fewer rows, so that no part is empty where there are at least as many rows as parts.

    Args:
        lengths: tokens of each row, >= 0.
        parts: >= 1.

    Returns:
        `parts` lists of indices into `lengths`, each ascending; some empty where rows are fewer than parts.

    Raises:
        ValueError: if parts < 1.
    """
    if parts < 1:
        raise ValueError(f"parts is {parts}; it must be at least 1")
    members: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0, 0, part) for part in range(parts)]  # (sum, rows, part)
    for row in _longest_first(lengths):
        total, count, part = heap[0]
        members[part].append(row)
        heapq.heapreplace(heap, (total + lengths[row], count + 1, part))
    return [sorted(rows) for rows in members]


def pack_by_budget(lengths: Sequence[int], budget: int, multiple: int = 1) -> list[list[int]]:
    """Cut rows into few micro-batches, similarly loaded, of at most `budget` tokens each.

    Tries `balanced_partition` at the fewest micro-batches the total allows, then one more, and so on; where none fits
    up to the count of first-fit decreasing (at most 11/9 of the optimum + 6/9), it takes the latter's bins.

    Args:
        lengths: tokens of each row, >= 0.
        budget: tokens of a micro-batch, >= 1.
        multiple: the number of micro-batches is a multiple of this.

    Returns:
        Lists of indices into `lengths`, each ascending; none is empty unless there are fewer rows than `multiple` asks
        micro-batches for. No lists for no rows.

    Raises:
        ValueError: if budget < 1, or if a row is longer than the budget (rows are never split).
    """
    if budget < 1:
        raise ValueError(f"budget is {budget}; it must be at least 1 token")
    if not lengths:
        return []
    longest = max(lengths)
    if longest > budget:
        raise ValueError(
            f"a row has {longest} tokens, more than the budget of {budget} tokens a micro-batch; "
            f"raise the budget to at least {longest} or shorten the rows"
        )
    fallback = _first_fit_decreasing(lengths, budget)
    fewest = -(-max(sum(lengths), 1) // (budget * multiple)) * multiple
    fallback += [[]] * (-len(fallback) % multiple)
    for parts in range(fewest, len(fallback) + 1, multiple):
        bins = balanced_partition(lengths, parts)
        if all(sum(lengths[row] for row in rows) <= budget for rows in bins):
            return bins
    return fallback


def unit_sums(lengths: npt.NDArray, unit: int) -> npt.NDArray:
    """Tokens of each unit of ``unit`` rows in a row, int64 [rows / unit]."""
    return lengths.reshape(-1, unit).sum(axis=1)


def unit_rows(units: Sequence[int] | npt.NDArray, unit: int) -> npt.NDArray:
    """The rows of some units, int64 [units * unit]."""
    return (np.asarray(units, dtype=np.int64)[:, None] * unit + np.arange(unit)).reshape(-1)


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))


def _first_fit_decreasing(lengths: Sequence[int], budget: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for row in _longest_first(lengths):
        for place in range(len(bins)):
            if lengths[row] <= room[place]:
                break
        else:
            place = len(bins)
            bins.append([])
            room.append(budget)
        bins[place].append(row)
        room[place] -= lengths[row]
    return [sorted(rows) for rows in bins]
