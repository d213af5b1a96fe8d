"""Correction for responses that were drawn from a slightly different policy than the one that is trained.

vLLM and Megatron compute the same weights with other kernels and in other orders, so that in bfloat16 their
log-probabilities differ; treated as on-policy, that is a bias (Yao et al., "Your Efficient RL Framework Secretly Brings
You Off-Policy RL Training", 2025). Importance weights undo it, truncated so that they stay bounded (Ionides, "Truncated
Importance Sampling", 2008; V-trace, arXiv:1802.01561, equation 1).

The same weights undo that responses were drawn from older weights. PPO's own ratio is then taken against the policy
just before the update, so that its clip bounds the update, and the weights alone account for what drew the tokens: the
decoupled objective of Hilton et al. (arXiv:2110.00641) and AReaL (arXiv:2505.24298, section 5.2).
"""

from __future__ import annotations

import torch

LEVELS = ("token", "sequence")


def truncated_weights(
    logprobs_bt: torch.Tensor, rollout_logprobs_bt: torch.Tensor, mask_bt: torch.Tensor, *, level: str, threshold: float
) -> torch.Tensor:
    """min(pi / mu, threshold), by which a token's policy loss is multiplied.

    Args:
        logprobs_bt: of the trained policy pi before the update, float32, nats.
        rollout_logprobs_bt: of the policy mu that drew the tokens.
        mask_bt: bool, real tokens.
        level: "token" (each token by itself) or "sequence" (the product over a row, for all its tokens).
        threshold: > 0.

    Returns:
        float32 [b, t]; 0 at masked tokens.

    Raises:
        ValueError: an unknown level, or a threshold that is not positive.
    """
    if level not in LEVELS:
        raise ValueError(f"level is {level!r}; use one of {', '.join(LEVELS)}")
    if threshold <= 0:
        raise ValueError(f"threshold is {threshold}; it must be > 0")
    log_ratio_bt = torch.where(mask_bt, logprobs_bt - rollout_logprobs_bt, 0.0)
    if level == "sequence":
        log_ratio_bt = log_ratio_bt.sum(dim=1, keepdim=True).expand_as(log_ratio_bt)
    # Clamped before exp, where a broken row would overflow: what is above is truncated in any case.
    weights_bt = log_ratio_bt.clamp(-20.0, 20.0).exp().clamp(max=threshold)
    return torch.where(mask_bt, weights_bt, 0.0)
