"""Advantages without a critic, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from megappo.ppo import estimators

# Three responses to prompt 5 with rewards 1, 2 and 6 in all, one to prompt 9 with reward 4; a hole in the first row.
REWARDS = torch.tensor([[0.5, 99.0, 0.5], [0.0, 2.0, 99.0], [1.0, 2.0, 3.0], [4.0, 99.0, 99.0]])
MASK = torch.tensor([[1, 0, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0]])
GROUPS = torch.tensor([5, 5, 5, 9])


def tokens(*values: float) -> torch.Tensor:
    return torch.tensor(values)[:, None] * MASK


def test_grpo() -> None:
    deviation = math.sqrt((4 + 1 + 9) / 2)  # around the mean of 3, unbiased
    found = estimators.grpo(REWARDS, MASK, GROUPS)
    torch.testing.assert_close(found, tokens(-2 / deviation, -1 / deviation, 3 / deviation, 4.0), atol=1e-5, rtol=1e-5)


def test_equal_rewards_teach_nothing() -> None:
    same = torch.ones(4, 2)
    mask, groups = torch.ones(4, 2), torch.tensor([1, 1, 2, 2])
    for function in (estimators.grpo, estimators.dr_grpo, estimators.rloo):
        assert function(same, mask, groups).abs().max() == 0


def test_dr_grpo() -> None:
    torch.testing.assert_close(estimators.dr_grpo(REWARDS, MASK, GROUPS), tokens(-2.0, -1.0, 3.0, 0.0))


def test_rloo() -> None:
    # The others' means: (2 + 6) / 2, (1 + 6) / 2, (1 + 2) / 2.
    torch.testing.assert_close(estimators.rloo(REWARDS, MASK, GROUPS), tokens(-3.0, -1.5, 4.5, 4.0))


def test_reinforce_plus_plus_discounts_over_real_tokens_only() -> None:
    found = estimators.reinforce_plus_plus(REWARDS, MASK, 0.5)
    expected = torch.tensor([[0.5 + 0.25, 0, 0.5], [1.0, 2.0, 0], [1 + 1 + 0.75, 2 + 1.5, 3.0], [4.0, 0, 0]])
    torch.testing.assert_close(found, expected)


def test_remax_subtracts_what_the_greedy_response_got() -> None:
    found = estimators.remax(REWARDS, MASK, torch.tensor([0.5, 2.0, 4.0, -1.0]))
    expected = torch.tensor(
        [[1.0 - 0.5, 0, 0.5 - 0.5], [2.0 - 2, 2.0 - 2, 0], [6.0 - 4, 5.0 - 4, 3.0 - 4], [5.0, 0, 0]]
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("function", [estimators.grpo, estimators.dr_grpo, estimators.rloo])
def test_groups_are_found_in_any_order_and_nan_outside_the_mask_does_not_matter(function) -> None:  # type: ignore[no-untyped-def]
    order = torch.tensor([3, 1, 0, 2])
    dirty = torch.where(MASK.bool(), REWARDS, torch.nan)
    found = function(dirty[order], MASK[order], GROUPS[order])
    torch.testing.assert_close(found, function(REWARDS, MASK, GROUPS)[order])
    assert function(REWARDS[:0], MASK[:0], GROUPS[:0]).shape == (0, 3)
