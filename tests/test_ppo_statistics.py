"""Masked statistics against Python's own statistics module."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.ppo.statistics import explained_variance, masked_max, masked_mean, masked_min, masked_std, summary

torch.set_num_threads(1)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-1e3, 1e3, width=32), st.booleans()), min_size=1, max_size=30))
def test_masked_statistics(tokens: list[tuple[float, bool]]) -> None:
    x = torch.tensor([value if mask else math.nan for value, mask in tokens])
    mask = torch.tensor([mask for _, mask in tokens])
    kept = [value for value, mask in tokens if mask]
    if not kept:
        assert all(math.isnan(f(x, mask)) for f in (masked_mean, masked_min, masked_max, masked_std))
        return
    assert masked_mean(x, mask) == pytest.approx(statistics.fmean(kept), abs=1e-9)
    assert masked_std(x, mask) == pytest.approx(statistics.pstdev(kept), abs=1e-6)
    assert (masked_min(x, mask), masked_max(x, mask)) == (min(kept), max(kept))


def test_without_a_mask_everything_counts() -> None:
    x_bt = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    assert summary(x_bt) == {"mean": 3.0, "max": 6.0, "min": 1.0}
    assert summary(torch.tensor([1, 2, 4])) == {"mean": pytest.approx(7 / 3), "max": 4.0, "min": 1.0}


def test_explained_variance() -> None:
    returns = torch.tensor([1.0, 2.0, 3.0, 4.0, math.nan])
    mask = torch.tensor([1, 1, 1, 1, 0])

    def explained(*values: float) -> float:
        return explained_variance(torch.tensor([*values, math.nan]), returns, mask)

    assert explained(1, 2, 3, 4) == 1.0
    assert explained(11, 12, 13, 14) == 1.0  # a constant offset is no variance
    assert explained(7, 7, 7, 7) == 0.0
    assert explained(4, 3, 2, 1) == pytest.approx(-3.0)  # residuals -3 -1 1 3: variance 5 against 1.25
    assert explained(2, 2, 3, 3) == pytest.approx(0.6)  # residuals -1 0 0 1: 0.5 against 1.25


def test_explained_variance_with_nothing_to_explain() -> None:
    constant = torch.full((4,), 0.1) + torch.tensor([0.0, 1e-8, 0.0, -1e-8])
    assert explained_variance(torch.randn(4), constant) == 0.0
    assert explained_variance(torch.zeros(2), torch.zeros(2)) == 0.0
    assert explained_variance(torch.zeros(2), torch.zeros(2), torch.zeros(2)) == 0.0
