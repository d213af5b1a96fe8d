"""Learning rates against hand-worked points of each curve."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megappo.ppo.schedule import learning_rate


def curve(schedule: str, *, warmup: int = 0, total: int = 4, ratio: float = 0.0, steps: int = 6) -> list[float]:
    return [
        learning_rate(step, base=8.0, warmup_steps=warmup, total_steps=total, schedule=schedule, min_ratio=ratio)
        for step in range(steps)
    ]


def test_hand_values() -> None:
    assert curve("constant") == [8.0] * 6
    assert curve("constant", warmup=4) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]
    assert curve("linear") == [8.0, 6.0, 4.0, 2.0, 0.0, 0.0]
    assert curve("linear", ratio=0.5) == [8.0, 7.0, 6.0, 5.0, 4.0, 4.0]
    assert curve("linear", warmup=2) == [4.0, 8.0, 8.0, 4.0, 0.0, 0.0]
    half_root = 2**0.5 / 2
    expected = [8.0, 4 * (1 + half_root), 4.0, 4 * (1 - half_root), 0.0, 0.0]
    assert curve("cosine") == pytest.approx(expected, abs=1e-12)
    assert curve("cosine", ratio=0.25)[2] == pytest.approx(5.0)
    assert curve("cosine", ratio=0.25)[4:] == pytest.approx([2.0, 2.0])


def test_warm_up_as_long_as_the_run_does_not_divide_by_zero() -> None:
    assert curve("linear", warmup=4) == [2.0, 4.0, 6.0, 8.0, 8.0, 0.0]


@given(st.sampled_from(["constant", "linear", "cosine"]), st.integers(0, 20), st.integers(0, 60), st.floats(0, 1))
def test_rises_then_falls_between_floor_and_peak(schedule: str, warmup: int, rest: int, ratio: float) -> None:
    rates = curve(schedule, warmup=warmup, total=warmup + rest, ratio=ratio, steps=100)
    assert all(a < b for a, b in itertools.pairwise(rates[:warmup]))
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(rates[warmup:]))
    assert rates[warmup] == pytest.approx(8.0)
    assert all(8.0 * ratio - 1e-9 <= rate <= 8.0 + 1e-9 for rate in rates[warmup:])
    assert all(rate > 0 for rate in rates[:warmup])


def test_unknown_schedule() -> None:
    with pytest.raises(ValueError, match="schedule is 'wsd'; use one of constant, linear, cosine"):
        curve("wsd")
