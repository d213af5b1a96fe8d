"""Rewards, GAE and whitening against hand-worked rows and against their definitions in plain Python floats."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.ppo.advantages import gae, token_rewards_bt, whiten

torch.set_num_threads(1)
NAN = math.nan


def test_score_on_the_last_token_and_kl_on_every_token() -> None:
    mask_bt = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]])
    kl_bt = torch.tensor([[1.0, 2.0, -4.0, NAN], [8.0, NAN, 0.5, NAN], [NAN] * 4, [1.0, NAN, NAN, NAN]])
    scores_b = torch.tensor([10.0, 20.0, 30.0, 40.0])
    rewards_bt = token_rewards_bt(scores_b, kl_bt, mask_bt, 0.5)
    expected = [[-0.5, -1.0, 12.0, 0.0], [-4.0, 0.0, 19.75, 0.0], [0.0] * 4, [39.5, 0.0, 0.0, 0.0]]
    assert rewards_bt.tolist() == expected
    assert rewards_bt.dtype == torch.float32


def test_no_kl_leaves_the_score_alone() -> None:
    rewards_bt = token_rewards_bt(torch.tensor([3.0, -1.0]), None, torch.tensor([[True, True], [True, False]]), 0.7)
    assert rewards_bt.tolist() == [[0.0, 3.0], [-1.0, 0.0]]


def test_gae_by_hand() -> None:
    # gamma 1/2, lam 1/2. deltas: 0 + 2 - 2 = 0;  0 + 3 - 4 = -1;  10 - 6 = 4.  A: 4;  -1 + 4/4 = 0;  0 + 0 = 0.
    advantages_bt, returns_bt = gae(
        torch.tensor([[0.0, 0.0, 10.0]]), torch.tensor([[2.0, 4.0, 6.0]]), torch.ones(1, 3), 0.5, 0.5
    )
    assert advantages_bt.tolist() == [[0.0, 0.0, 4.0]]
    assert returns_bt.tolist() == [[2.0, 4.0, 10.0]]


def test_gae_steps_once_over_a_hole_and_never_reads_it() -> None:
    advantages_bt, returns_bt = gae(
        torch.tensor([[0.0, NAN, 0.0, NAN, 10.0, NAN]]),
        torch.tensor([[2.0, NAN, 4.0, NAN, 6.0, NAN]]),
        torch.tensor([[1, 0, 1, 0, 1, 0]]),
        0.5,
        0.5,
    )
    assert advantages_bt.tolist() == [[0.0, 0.0, 0.0, 0.0, 4.0, 0.0]]
    assert returns_bt.tolist() == [[2.0, 0.0, 4.0, 0.0, 10.0, 0.0]]


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_gae_of_nothing(shape: tuple[int, int]) -> None:
    advantages_bt, returns_bt = gae(torch.zeros(shape), torch.zeros(shape), torch.zeros(shape), 1.0, 0.9)
    assert advantages_bt.shape == returns_bt.shape == shape


def test_gae_does_not_lose_digits_over_a_long_response() -> None:
    """One reward far away: A_0 = (gamma lam)^(n-1) when all values are 0, to float32's last digits after 4096 steps."""
    n, gamma, lam = 4096, 0.9999, 0.9995
    rewards_bt = torch.zeros(1, n)
    rewards_bt[0, -1] = 1.0
    advantages_bt, _ = gae(rewards_bt, torch.zeros(1, n), torch.ones(1, n), gamma, lam)
    assert advantages_bt[0, 0].item() == pytest.approx(math.exp((n - 1) * math.log(gamma * lam)), rel=2e-7)


FINITE = st.floats(-10, 10, width=32)
TOKENS = st.lists(st.tuples(FINITE, FINITE, st.booleans()), max_size=9)  # (reward, value, mask)
BATCH = st.lists(TOKENS, min_size=1, max_size=4)
UNIT = st.floats(0, 1)


def tensors(batch: list[list[tuple[float, float, bool]]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pad to a rectangle; padding and masked-out tokens hold NaN, which would show if read."""
    width = max(len(row) for row in batch) + 1
    columns = torch.full((3, len(batch), width), NAN, dtype=torch.float64)
    columns[2] = 0
    for i, row in enumerate(batch):
        for t, (reward, value, mask) in enumerate(row):
            columns[:, i, t] = torch.tensor([reward if mask else NAN, value if mask else NAN, float(mask)])
    return columns[0], columns[1], columns[2].bool()


@settings(deadline=None, max_examples=150)
@given(BATCH, UNIT, UNIT)
def test_gae_is_the_discounted_sum_of_td_errors(
    batch: list[list[tuple[float, float, bool]]], gamma: float, lam: float
) -> None:
    """The definition (a sum forwards, for each token), over rows with the masked-out tokens taken away."""
    rewards_bt, values_bt, mask_bt = tensors(batch)
    advantages_bt, returns_bt = gae(rewards_bt, values_bt, mask_bt, gamma, lam)
    assert not advantages_bt[~mask_bt].any() and not returns_bt[~mask_bt].any()
    for i, row in enumerate(batch):
        rewards = [reward for reward, _, mask in row if mask]
        values = [value for _, value, mask in row if mask] + [0.0]
        n = len(rewards)
        deltas = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(n)]
        expected = [math.fsum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]
        assert advantages_bt[i][mask_bt[i]].tolist() == pytest.approx(expected, abs=1e-9)
        assert returns_bt[i][mask_bt[i]].tolist() == pytest.approx(
            [a + v for a, v in zip(expected, values, strict=False)], abs=1e-9
        )


@settings(deadline=None, max_examples=75)
@given(BATCH, UNIT)
def test_gae_limits(batch: list[list[tuple[float, float, bool]]], gamma: float) -> None:
    """lam = 1: returns are discounted rewards, whatever the critic says. lam = 0: advantages are one-step TD errors."""
    rewards_bt, values_bt, mask_bt = tensors(batch)
    _, monte_carlo_bt = gae(rewards_bt, values_bt, mask_bt, gamma, 1.0)
    one_step_bt, _ = gae(rewards_bt, values_bt, mask_bt, gamma, 0.0)
    for i, row in enumerate(batch):
        kept = [(reward, value) for reward, value, mask in row if mask]
        n = len(kept)
        discounted = [math.fsum(gamma ** (k - t) * kept[k][0] for k in range(t, n)) for t in range(n)]
        assert monte_carlo_bt[i][mask_bt[i]].tolist() == pytest.approx(discounted, abs=1e-9)
        next_values = [value for _, value in kept[1:]] + [0.0]
        td = [r + gamma * after - v for (r, v), after in zip(kept, next_values, strict=False)]
        assert one_step_bt[i][mask_bt[i]].tolist() == pytest.approx(td, abs=1e-9)


def test_whiten_by_hand() -> None:
    x_bt = torch.tensor([[1.0, 2.0, NAN], [NAN, 3.0, NAN]])
    mask_bt = torch.tensor([[1, 1, 0], [0, 1, 0]])
    # mean 2, unbiased variance (1 + 0 + 1) / 2 = 1
    torch.testing.assert_close(whiten(x_bt, mask_bt), torch.tensor([[-1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]))


@pytest.mark.parametrize("mask", [[0, 0, 0], [0, 1, 0], [1, 1, 0]])
def test_whiten_without_spread_gives_zero(mask: list[int]) -> None:
    assert whiten(torch.tensor([[7.0, 7.0, 9.0]]), torch.tensor([mask])).tolist() == [[0.0, 0.0, 0.0]]


@settings(deadline=None, max_examples=75)
@given(
    st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=30),
    st.floats(0.5, 50),
    st.floats(-1000, 1000),
    st.randoms(use_true_random=False),
)
def test_whiten_invariances(values: list[float], scale: float, shift: float, shuffler: object) -> None:
    if max(values) - min(values) < 1:
        values = [*values, values[0] + 1]  # enough spread for the 1e-8 under the root not to show
    x = torch.tensor(values, dtype=torch.float64)
    all_on = torch.ones_like(x)
    white = whiten(x, all_on)
    assert statistics.fmean(white.tolist()) == pytest.approx(0, abs=1e-9)
    assert statistics.variance(white.tolist()) == pytest.approx(1, rel=1e-5)
    torch.testing.assert_close(whiten(scale * x + shift, all_on), white, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(whiten(-x, all_on), -white)
    order = list(range(len(values)))
    shuffler.shuffle(order)  # type: ignore[attr-defined]
    torch.testing.assert_close(whiten(x[order], all_on), white[order])
    # Padding changes nothing.
    padded = torch.cat([torch.tensor([NAN, 1e30], dtype=torch.float64), x])
    padded_white = whiten(padded, torch.cat([torch.zeros(2), torch.ones(len(values))]))
    assert padded_white[:2].tolist() == [0.0, 0.0]
    torch.testing.assert_close(padded_white[2:], white)
