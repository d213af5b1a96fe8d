"""Explained variance, worked out by hand."""

from __future__ import annotations

import pytest
import torch

from megappo.ppo.explained_variance import explained_variance


def test_explained_variance() -> None:
    def explained(*values: float) -> float:
        return explained_variance(torch.tensor(values), torch.tensor([1.0, 2.0, 3.0, 4.0]))

    assert explained(1, 2, 3, 4) == 1.0
    assert explained(11, 12, 13, 14) == 1.0  # a constant offset is no variance
    assert explained(7, 7, 7, 7) == 0.0
    assert explained(4, 3, 2, 1) == pytest.approx(-3.0)  # residuals -3 -1 1 3: variance 5 against 1.25
    assert explained(2, 2, 3, 3) == pytest.approx(0.6)  # residuals -1 0 0 1: 0.5 against 1.25


def test_nothing_to_explain() -> None:
    constant = torch.full((4,), 0.1) + torch.tensor([0.0, 1e-8, 0.0, -1e-8])
    assert explained_variance(torch.randn(4), constant) == 0.0
    assert explained_variance(torch.zeros(2), torch.zeros(2)) == 0.0
    assert explained_variance(torch.zeros(0), torch.zeros(0)) == 0.0
