"""Advantages without a critic: from the rewards of several responses to one prompt, or from the rewards alone.

Each takes token rewards [b, t] with a mask, and most the group of each row: rows of one group answer one prompt. All
give an advantage for each token [b, t], 0 where the mask is 0, computed in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-6
"""Added to a group's standard deviation, as verl does; a group of equal rewards has no advantage anyway."""


def grpo(rewards_bt: Tensor, mask_bt: Tensor, groups_b: Tensor) -> Tensor:
    """A_i = (R_i - mean(R)) / std(R) over the group, for every token of response i.

    GRPO with outcome supervision, Shao et al. (arXiv:2402.03300, section 4.1.2); the deviation is the unbiased one. A
    response that is alone in its group gets R_i itself, as in verl.
    """
    rewards_b = _totals(rewards_bt, mask_bt)
    count_b, mean_b = _group_means(rewards_b, groups_b)
    centred_b = rewards_b - mean_b
    squares_b = _group_sums(centred_b.square(), groups_b)
    deviation_b = (squares_b / (count_b - 1).clamp(min=1)).sqrt()
    alone_b = count_b == 1
    advantages_b = torch.where(alone_b, rewards_b, centred_b / (deviation_b + EPSILON))
    return _to_tokens(advantages_b, mask_bt, rewards_bt.dtype)


def dr_grpo(rewards_bt: Tensor, mask_bt: Tensor, groups_b: Tensor) -> Tensor:
    """A_i = R_i - mean(R) over the group: GRPO without the division that favours easy and hard prompts.

    Dr. GRPO, Liu et al. (arXiv:2503.20783, section 3.2). Its other half, a loss that is not divided by the response's
    length, is the aggregation ``seq_mean_token_sum``.
    """
    rewards_b = _totals(rewards_bt, mask_bt)
    _, mean_b = _group_means(rewards_b, groups_b)
    return _to_tokens(rewards_b - mean_b, mask_bt, rewards_bt.dtype)


def rloo(rewards_bt: Tensor, mask_bt: Tensor, groups_b: Tensor) -> Tensor:
    """A_i = R_i - mean of the other responses' R in the group.

    REINFORCE leave-one-out, Ahmadian et al. (arXiv:2402.14740, section 3.3). A response that is alone gets R_i itself.
    """
    rewards_b = _totals(rewards_bt, mask_bt)
    count_b, mean_b = _group_means(rewards_b, groups_b)
    others_b = (mean_b * count_b - rewards_b) / (count_b - 1).clamp(min=1)
    return _to_tokens(rewards_b - torch.where(count_b > 1, others_b, 0.0), mask_bt, rewards_bt.dtype)


def reinforce_plus_plus(rewards_bt: Tensor, mask_bt: Tensor, gamma: float) -> Tensor:
    """A_t = r_t + gamma r_{t+1} + gamma^2 r_{t+2} + ...: the discounted reward from token t on, not yet whitened.

    REINFORCE++, Hu (arXiv:2501.03262, section 3), which then whitens over the whole batch. Masked tokens are skipped as
    though they were absent.
    """
    mask_bt = mask_bt.bool()
    rewards_tb = torch.where(mask_bt, rewards_bt.double(), 0.0).T.contiguous()
    out_tb = torch.zeros_like(rewards_tb)
    later_b = torch.zeros(rewards_tb.shape[1], dtype=torch.float64, device=rewards_tb.device)
    for t in reversed(range(rewards_tb.shape[0])):
        later_b = torch.where(mask_bt[:, t], rewards_tb[t] + gamma * later_b, later_b)
        out_tb[t] = later_b
    return torch.where(mask_bt, out_tb.T, 0.0).to(rewards_bt.dtype)


def remax(rewards_bt: Tensor, mask_bt: Tensor, baselines_b: Tensor) -> Tensor:
    """A_t = r_t + r_{t+1} + ... - b: the reward from token t on, less that of the greedy response to the same prompt.

    ReMax, Li et al. (arXiv:2310.10505, section 4). Where the reward is the score on the last token alone, that is
    R - b for every token, as in the paper.

    Args:
        baselines_b: [b] float, the score of the greedy response to each row's prompt.
    """
    later_bt = reinforce_plus_plus(rewards_bt.double(), mask_bt, 1.0)
    return torch.where(mask_bt.bool(), later_bt - baselines_b.double()[:, None], 0.0).to(rewards_bt.dtype)


def _totals(rewards_bt: Tensor, mask_bt: Tensor) -> Tensor:
    """[b] float64: each response's reward."""
    return torch.where(mask_bt.bool(), rewards_bt.double(), 0.0).sum(1)


def _group_sums(x_b: Tensor, groups_b: Tensor) -> Tensor:
    """[b]: for each row, the sum over its group."""
    _, number_b = groups_b.unique(return_inverse=True)
    sums_g = x_b.new_zeros(int(number_b.max()) + 1 if len(number_b) else 0).index_add(0, number_b, x_b)
    return sums_g[number_b]


def _group_means(x_b: Tensor, groups_b: Tensor) -> tuple[Tensor, Tensor]:
    """([b] rows of each row's group, [b] their mean)."""
    count_b = _group_sums(torch.ones_like(x_b), groups_b)
    return count_b, _group_sums(x_b, groups_b) / count_b


def _to_tokens(x_b: Tensor, mask_bt: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(mask_bt.bool(), x_b[:, None], 0.0).to(dtype)
