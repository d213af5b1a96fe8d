"""The learning rate as a function of the step alone, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from megappo.config import OptimizerConfig, PPOConfig


def learning_rate(step: int, *, peak: float, total_steps: int, optimizer: OptimizerConfig) -> float:
    """The learning rate of update `step`, counted from 0.

    Linear warm-up first: peak * (step + 1) / warmup_steps, so that the first update is not wasted on a rate of 0. Then,
    with p the share of the remaining steps already done:

    - constant: peak
    - linear: peak * (min_lr_ratio + (1 - min_lr_ratio) * (1 - p))
    - cosine: peak * (min_lr_ratio + (1 - min_lr_ratio) * (1 + cos(pi p)) / 2), SGDR (arXiv:1608.03983), equation 5

    The floor peak * min_lr_ratio is reached at step total_steps, one past the last, and holds from there on.

    Args:
        step: >= 0.
        total_steps: updates of the whole run, warm-up included.
        optimizer: which schedule, and its parameters.
    """
    warmup, floor = optimizer.warmup_steps, optimizer.min_lr_ratio
    if step < warmup:
        return peak * (step + 1) / warmup
    if optimizer.schedule == "constant":
        return peak
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    height = 1 - progress if optimizer.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (floor + (1 - floor) * height)


def learning_rates(ppo: PPOConfig, step: int, total_steps: int) -> dict[str, float]:
    """The learning rate of each role that trains in a step, counted from 0; the actor's first may be a later one."""
    rates = {}
    if ppo.needs_critic:
        peak, optimizer = ppo.critic_lr or 0.0, ppo.optimizers["critic"]
        rates["critic"] = learning_rate(step, peak=peak, total_steps=total_steps, optimizer=optimizer)
    if (own := step - ppo.critic_warmup) >= 0:
        left = total_steps - ppo.critic_warmup
        rates["actor"] = learning_rate(own, peak=ppo.actor_lr, total_steps=left, optimizer=ppo.optimizers["actor"])
    return rates
