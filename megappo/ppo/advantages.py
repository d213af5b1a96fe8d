"""From scores and values to advantages: token-level rewards, generalised advantage estimation, whitening.

Tensors are [b, t]: a row per sample, a column per response token. A mask (bool, or 0/1 of any dtype) marks the tokens
that count. What stands at the other positions, even NaN, never reaches a result, and results are 0 there.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_rewards_bt(scores_b: Tensor, kl_bt: Tensor | None, mask_bt: Tensor, kl_coef: float) -> Tensor:
    """The reward of each token: -kl_coef * KL everywhere, plus the row's score on its last token.

    R(x, y) = r(x, y) - beta * log(pi / ref), Ziegler et al. (arXiv:1909.08593), equation 2; the penalty is charged
    token by token as in InstructGPT (arXiv:2203.02155, section 3.5).

    Args:
        scores_b: [b] float, the score of each response.
        kl_bt: [b, t] float, KL per token in nats (see `kl.kl_estimate`), or None for no penalty.
        mask_bt: [b, t].
        kl_coef: beta.

    Returns:
        [b, t], dtype of `scores_b`. A row without tokens has nowhere to put its score and stays 0.
    """
    mask_bt = mask_bt.bool()
    rewards_bt = torch.zeros(mask_bt.shape, dtype=scores_b.dtype, device=scores_b.device)
    if kl_bt is not None:
        rewards_bt = torch.where(mask_bt, -kl_coef * kl_bt.to(scores_b.dtype), rewards_bt)
    # The last token of a row is the masked one with no masked token after it.
    tokens_from_here_bt = mask_bt.long().flip(1).cumsum(1).flip(1)
    is_last_bt = mask_bt & (tokens_from_here_bt == 1)
    return torch.where(is_last_bt, rewards_bt + scores_b[:, None], rewards_bt)


def gae(rewards_bt: Tensor, values_bt: Tensor, mask_bt: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the masked tokens of each row.

    Schulman et al. (arXiv:1506.02438), equation 16: A_t = sum_k (gamma lam)^k delta_{t+k} with
    delta_t = r_t + gamma V_{t+1} - V_t, and V = 0 after the last token, also where a response was cut at its length
    limit. Returns are the targets of the critic, A_t + V_t (the TD(lambda) return).

    A token with mask 0 is skipped as though it were absent: the step from the token before a hole to the token after it
    discounts once.

    Args:
        rewards_bt, values_bt: [b, t] float.
        mask_bt: [b, t].
        gamma: discount per token.
        lam: 0 gives the TD error, 1 the discounted return minus the value.

    Returns:
        (advantages_bt, returns_bt), dtype of `values_bt`; the recursion itself runs in float64.
    """
    # Time first: each step of the scan then reads contiguous memory.
    mask_tb = mask_bt.bool().T.contiguous()
    zero = torch.zeros((), dtype=torch.float64, device=values_bt.device)
    rewards_tb = torch.where(mask_tb, rewards_bt.T.double(), zero)
    values_tb = torch.where(mask_tb, values_bt.T.double(), zero)

    advantages_tb = torch.zeros_like(values_tb)
    next_advantage_b = next_value_b = zero
    for t in reversed(range(values_tb.shape[0])):
        delta_b = rewards_tb[t] + gamma * next_value_b - values_tb[t]
        advantage_b = delta_b + gamma * lam * next_advantage_b
        next_advantage_b = torch.where(mask_tb[t], advantage_b, next_advantage_b)
        next_value_b = torch.where(mask_tb[t], values_tb[t], next_value_b)
        advantages_tb[t] = torch.where(mask_tb[t], advantage_b, zero)

    dtype = values_bt.dtype
    return advantages_tb.T.to(dtype).contiguous(), (advantages_tb + values_tb).T.to(dtype).contiguous()


def whiten(x_bt: Tensor, mask_bt: Tensor) -> Tensor:
    """Shift and scale to mean 0 and variance 1 over all masked tokens of the batch.

    As verl's `masked_whiten`: the variance is the unbiased one (n - 1), and 1e-8 is added to it before the root. Unlike
    there, a batch with a single token gives 0 instead of an error.

    Args:
        x_bt: [b, t] float (any other shape works too).
        mask_bt: same shape.

    Returns:
        Same shape and dtype; computed in float64.
    """
    mask_bt = mask_bt.bool()
    zero = torch.zeros((), dtype=torch.float64, device=x_bt.device)
    count = mask_bt.sum()
    x64_bt = torch.where(mask_bt, x_bt.double(), zero)
    mean = x64_bt.sum() / count.clamp(min=1)
    centred_bt = torch.where(mask_bt, x64_bt - mean, zero)
    variance = centred_bt.square().sum() / (count - 1).clamp(min=1)
    return (centred_bt * torch.rsqrt(variance + 1e-8)).to(x_bt.dtype)
