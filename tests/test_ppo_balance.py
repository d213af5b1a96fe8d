"""Splits of rows: every row once, budgets kept, loads close to the optimum that an exhaustive search finds."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.ppo.balance import balanced_partition, mini_batches, pack_by_budget

LENGTHS = st.lists(st.integers(0, 50), max_size=40)


def loads(lengths: list[int], bins: list[list[int]]) -> list[int]:
    return [sum(lengths[row] for row in rows) for rows in bins]


def assert_each_once_ascending(bins: list[list[int]], num_rows: int) -> None:
    assert sorted(itertools.chain(*bins)) == list(range(num_rows))
    assert all(rows == sorted(rows) for rows in bins)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 9))
def test_partition_covers_and_balances(lengths: list[int], parts: int) -> None:
    bins = balanced_partition(lengths, parts)
    assert len(bins) == parts
    assert_each_once_ascending(bins, len(lengths))
    # Greedy: when the fullest part got its last row it was the emptiest, so it was at most at the mean.
    assert max(loads(lengths, bins)) <= sum(lengths) / parts + max(lengths, default=0)
    assert sum(not rows for rows in bins) == max(0, parts - len(lengths))
    assert bins == balanced_partition(tuple(lengths), parts)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.integers(1, 3))
def test_partition_is_within_a_third_of_the_optimum(lengths: list[int], parts: int) -> None:
    optimum = min(
        max(sum(n for n, home in zip(lengths, homes, strict=True) if home == part) for part in range(parts))
        for homes in itertools.product(range(parts), repeat=len(lengths))
    )
    assert 3 * parts * max(loads(lengths, balanced_partition(lengths, parts))) <= (4 * parts - 1) * optimum


def test_partition_by_hand() -> None:
    assert balanced_partition([8, 7, 6, 5, 4], 2) == [[0, 3, 4], [1, 2]]  # 8 | 7, 8 | 13, 13 | 13, then the 4
    assert balanced_partition([3], 3) == [[0], [], []]
    assert balanced_partition([0, 0, 0, 0], 2) == [[0, 2], [1, 3]]
    with pytest.raises(ValueError, match="parts is 0"):
        balanced_partition([1], 0)


@settings(deadline=None)
@given(LENGTHS, st.integers(50, 200))
def test_pack_keeps_the_budget(lengths: list[int], budget: int) -> None:
    bins = pack_by_budget(lengths, budget)
    assert_each_once_ascending(bins, len(lengths))
    assert all(bins)
    assert all(load <= budget for load in loads(lengths, bins))
    assert bins == pack_by_budget(lengths, budget)
    if lengths:
        # Any two first-fit bins together exceed the budget, so fewer than twice the total suffice.
        assert len(bins) <= max(1, 2 * sum(lengths) / budget)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 10), min_size=1, max_size=6), st.integers(10, 20))
def test_pack_needs_few_bins(lengths: list[int], budget: int) -> None:
    def fits(parts: int) -> bool:
        return any(
            all(sum(n for n, home in zip(lengths, homes, strict=True) if home == p) <= budget for p in range(parts))
            for homes in itertools.product(range(parts), repeat=len(lengths))
        )

    optimum = next(parts for parts in itertools.count(1) if fits(parts))
    assert 9 * len(pack_by_budget(lengths, budget)) <= 11 * optimum + 6


def test_pack_loads_bins_alike() -> None:
    assert loads([5, 5, 5, 5], pack_by_budget([5, 5, 5, 5], 15)) == [10, 10]  # first fit alone: 15 and 5


def test_pack_falls_back_to_first_fit_where_the_greedy_split_fails() -> None:
    # Two bins suffice (3 + 3, 2 + 2 + 2) though the greedy split gives 3 2 2 | 3 2, one over the budget.
    lengths = [3, 3, 2, 2, 2]
    assert max(loads(lengths, balanced_partition(lengths, 2))) == 7
    assert pack_by_budget(lengths, 6) == [[0, 1], [2, 3, 4]]


def test_pack_edges() -> None:
    assert pack_by_budget([], 10) == []
    assert pack_by_budget([0, 0], 10) == [[0, 1]]
    assert pack_by_budget([10], 10) == [[0]]
    assert pack_by_budget([5, 5, 5, 5, 5], 10, multiple=2) == [[0, 4], [1], [2], [3]]
    assert pack_by_budget([10, 10, 10], 10, multiple=2) == [[0], [1], [2], []]
    assert pack_by_budget([], 10, multiple=2) == []
    with pytest.raises(ValueError, match=r"a row has 11 tokens, more than the budget of 10 tokens"):
        pack_by_budget([3, 11], 10)
    with pytest.raises(ValueError, match="budget is 0"):
        pack_by_budget([], 0)


@given(st.integers(0, 50), st.integers(1, 12), st.none() | st.integers() | st.text())
def test_mini_batches_hold_every_row_once(num_rows: int, size: int, seed: int | str | None) -> None:
    batches = mini_batches(num_rows, size, seed)
    assert sorted(itertools.chain(*batches)) == list(range(num_rows))
    assert all(len(batch) == size for batch in batches[:-1])
    assert all(0 < len(batch) <= size for batch in batches)
    assert batches == mini_batches(num_rows, size, seed)


def test_mini_batches_order() -> None:
    assert mini_batches(5, 2) == [[0, 1], [2, 3], [4]]
    assert mini_batches(100, 100, "1/0/0") != mini_batches(100, 100, "1/0/1")
    assert mini_batches(100, 100, 0) != mini_batches(100, 100)
    with pytest.raises(ValueError, match="size is 0"):
        mini_batches(5, 0)
