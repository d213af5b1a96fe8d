"""Truncated importance weights, worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from megappo.ppo.correction import truncated_weights

MU = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.0, 0.0]])
PI = torch.tensor([[-1.0 + math.log(1.5), -2.0 + math.log(4.0), -3.0 + math.log(0.25)], [-1.5, -0.5, 9.0]])
MASK = torch.tensor([[True, True, True], [True, True, False]])


def test_each_token_by_itself() -> None:
    weights = truncated_weights(PI, MU, MASK, level="token", threshold=2.0)
    expected = torch.tensor([[1.5, 2.0, 0.25], [math.exp(-0.5), math.exp(0.5), 0.0]])
    torch.testing.assert_close(weights, expected)


def test_the_whole_sequence() -> None:
    weights = truncated_weights(PI, MU, MASK, level="sequence", threshold=2.0)
    torch.testing.assert_close(weights, torch.tensor([[1.5, 1.5, 1.5], [1.0, 1.0, 0.0]]))  # 1.5 * 4 * 0.25
    capped = truncated_weights(PI, MU, MASK, level="sequence", threshold=1.2)
    torch.testing.assert_close(capped, torch.tensor([[1.2, 1.2, 1.2], [1.0, 1.0, 0.0]]))


def test_a_broken_row_stays_bounded() -> None:
    pi = torch.tensor([[500.0, 500.0]])
    weights = truncated_weights(pi, torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool), level="token", threshold=3.0)
    assert weights.tolist() == [[3.0, 3.0]]


@pytest.mark.parametrize(("level", "threshold"), [("row", 2.0), ("token", 0.0)])
def test_refused(level: str, threshold: float) -> None:
    with pytest.raises(ValueError, match=r"level is 'row'|threshold is 0"):
        truncated_weights(PI, MU, MASK, level=level, threshold=threshold)
