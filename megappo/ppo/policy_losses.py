"""Losses of the policy, per token and unreduced: PPO's clipped surrogate, and what GSPO and CISPO make of it.

Each gives (loss_n, stats). The stats are detached tensors of the same shape: `clipped` (1 where the upper or lower clip
holds the token back, verl's pg_clipfrac), `clipped_lower` (1 where the dual clip does, verl's pg_clipfrac_lower),
`approx_kl` (old - new log-probability, unclamped) and `ratio` (the importance ratio that the loss uses).

Log-ratios are clamped to [-20, 20] before exp, so that one broken token cannot make a loss infinite.

Shape suffix _n: flat tokens of a packed micro-batch, _b: its rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megappo.ppo.kl import MAX_LOG_RATIO

Stats = dict[str, Tensor]


def ppo_loss(
    logprobs_n: Tensor,
    old_logprobs_n: Tensor,
    advantages_n: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Stats]:
    """The clipped surrogate, negated to be minimised, per token.

    With ratio = exp(logprobs - old_logprobs):

    - max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high)): Schulman et al. (arXiv:1707.06347), equation 7; the
      two separate bounds are DAPO's clip-higher (arXiv:2503.14476, equation 10).
    - where A < 0, at most -A dual_clip: Ye et al. (arXiv:1912.09729), equation 5. It bounds the one case that the first
      clip leaves open, a large ratio at a negative advantage.

    Where the log-ratio is clamped, the token has no gradient.

    Args:
        logprobs_n: of the policy being trained, nats; the gradient flows through it.
        old_logprobs_n: of the policy that generated the tokens, nats.
        advantages_n: advantages.
        clip_low: 0 <= clip_low <= 1.
        clip_high: >= 0.
        dual_clip: > 1, or None to leave it out.

    Returns:
        (loss_n, stats): see above.

    Raises:
        ValueError: if a clip is out of its range.
    """
    _check_clips(clip_low, clip_high)
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip is {dual_clip}; it must be > 1, or None to leave it out")

    log_ratio_n = logprobs_n - old_logprobs_n
    ratio_n = log_ratio_n.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    unclipped_n = -advantages_n * ratio_n
    clipped_n = -advantages_n * ratio_n.clamp(1 - clip_low, 1 + clip_high)
    loss_n = torch.maximum(unclipped_n, clipped_n)

    clipped_lower_n = torch.zeros_like(loss_n, dtype=torch.bool)
    if dual_clip is not None:
        ceiling_n = -advantages_n * dual_clip
        clipped_lower_n = (advantages_n < 0) & (loss_n > ceiling_n)
        loss_n = torch.where(clipped_lower_n, ceiling_n, loss_n)

    return loss_n, _stats(clipped_n > unclipped_n, log_ratio_n, ratio_n, clipped_lower_n)


def gspo_loss(
    logprobs_n: Tensor,
    old_logprobs_n: Tensor,
    advantages_n: Tensor,
    sequence_log_ratio_n: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Stats]:
    """PPO's clipped surrogate of the whole sequence's ratio, spread over its tokens.

    Zheng et al. (arXiv:2507.18071). The ratio of response i is the geometric mean of its tokens' (equation 7),
    s_i = exp(mean_t(logprobs - old_logprobs)). This is the token form of the loss (GSPO-token, equations 13 and 14):
    token t has the ratio sg[s_i] * exp(logprobs_t - sg[logprobs_t]), sg stopping the gradient, which is s_i in value,
    and whose gradient sums to that of s_i (equation 10) where a row's tokens are averaged. So no token's loss needs the
    gradient of another, and advantages may differ from token to token. With the aggregation seq_mean_token_mean it is
    the loss of equation 5; its clips are far narrower than PPO's (3e-4 and 4e-4 in the paper).

    Args:
        logprobs_n, old_logprobs_n, advantages_n, clip_low, clip_high: see :func:`ppo_loss`.
        sequence_log_ratio_n: log s_i for every token of row i, without gradient; see :func:`sequence_log_ratio`.
    """
    _check_clips(clip_low, clip_high)
    log_ratio_n = sequence_log_ratio_n.detach() + logprobs_n - logprobs_n.detach()
    ratio_n = log_ratio_n.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    unclipped_n = -advantages_n * ratio_n
    clipped_n = -advantages_n * ratio_n.clamp(1 - clip_low, 1 + clip_high)
    loss_n = torch.maximum(unclipped_n, clipped_n)
    return loss_n, _stats(clipped_n > unclipped_n, logprobs_n - old_logprobs_n, ratio_n)


def sequence_log_ratio(log_ratio_n: Tensor, lengths_b: Tensor) -> Tensor:
    """The mean of each row's log-ratios, for every token of the row: log s_i of equation 7, arXiv:2507.18071.

    Args:
        log_ratio_n: float, rows one after the other.
        lengths_b: int64, tokens of each row, >= 1.

    Returns:
        Same shape and dtype as `log_ratio_n`.
    """
    if len(log_ratio_n) == 0:
        return log_ratio_n
    means_b = torch.segment_reduce(log_ratio_n, "mean", lengths=lengths_b)
    return means_b.repeat_interleave(lengths_b)


def cispo_loss(
    logprobs_n: Tensor, old_logprobs_n: Tensor, advantages_n: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Stats]:
    """REINFORCE weighted by the clipped ratio: - sg[clip(ratio, 1 - clip_low, 1 + clip_high)] A logprobs.

    CISPO, MiniMax-M1 (arXiv:2506.13585), equations 4 and 5, sg stopping the gradient. Unlike PPO's, a token whose ratio
    is clipped still has a gradient. The paper sets no lower bound, which is clip_low = 1.

    Args:
        See :func:`ppo_loss`. Stats: `clipped` is 1 where the ratio lies outside of its bounds.
    """
    _check_clips(clip_low, clip_high)
    log_ratio_n = logprobs_n - old_logprobs_n
    ratio_n = log_ratio_n.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weight_n = ratio_n.clamp(1 - clip_low, 1 + clip_high)
    return -weight_n * advantages_n * logprobs_n, _stats(weight_n != ratio_n, log_ratio_n, ratio_n)


def _check_clips(clip_low: float, clip_high: float) -> None:
    if not 0 <= clip_low <= 1:
        raise ValueError(f"clip_low is {clip_low}; it must lie in [0, 1]")
    if clip_high < 0:
        raise ValueError(f"clip_high is {clip_high}; it must be >= 0")


def _stats(clipped_n: Tensor, log_ratio_n: Tensor, ratio_n: Tensor, clipped_lower_n: Tensor | None = None) -> Stats:
    lower_n = torch.zeros_like(ratio_n.detach()) if clipped_lower_n is None else clipped_lower_n
    return {
        "clipped": clipped_n.to(ratio_n.dtype),
        "clipped_lower": lower_n.to(ratio_n.dtype),
        "approx_kl": -log_ratio_n.detach(),
        "ratio": ratio_n.detach(),
    }
