"""Learning rates against hand-worked points of each curve."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megappo.config import OptimizerConfig, PPOConfig
from megappo.ppo.schedule import learning_rate, learning_rates


def curve(schedule: Any, *, warmup: int = 0, total: int = 4, ratio: float = 0.0, steps: int = 6) -> list[float]:
    optimizer = OptimizerConfig(warmup_steps=warmup, schedule=schedule, min_lr_ratio=ratio)
    return [learning_rate(step, peak=8.0, total_steps=total, optimizer=optimizer) for step in range(steps)]


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


def test_the_actors_schedule_begins_with_its_first_update() -> None:
    optimizer, own = OptimizerConfig(warmup_steps=2, schedule="linear"), OptimizerConfig(schedule="linear")
    ppo = PPOConfig(mini_batch=1, actor_lr=8.0, critic_lr=4.0, critic_warmup=2, optimizer=optimizer)
    rates = [learning_rates(ppo, step, 6) for step in range(6)]
    assert [one["critic"] for one in rates] == [2.0, 4.0, 4.0, 3.0, 2.0, 1.0]
    assert [one.get("actor") for one in rates] == [None, None, 4.0, 8.0, 8.0, 4.0]
    rates = [learning_rates(replace(ppo, critic_optimizer=own, critic_warmup=0), step, 4) for step in range(4)]
    assert [one["critic"] for one in rates] == [4.0, 3.0, 2.0, 1.0], "without a warm-up, as its own settings say"
    assert [one["actor"] for one in rates] == [4.0, 8.0, 8.0, 4.0]
    assert learning_rates(replace(ppo, estimator="grpo", critic_warmup=0), 1, 6) == {"actor": 8.0}
