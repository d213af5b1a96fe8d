"""KL divergence between the policy and the reference: per-token estimators and the adaptive coefficient."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

# exp(20) = 4.9e8: far beyond any log-ratio that training survives, far below float32's overflow at exp(88).
MAX_LOG_RATIO = 20.0
ESTIMATORS = ("k1", "k2", "k3")


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimate KL(policy || reference) per token, from tokens that the policy sampled.

    With log r = ref_logprobs - logprobs (J. Schulman, "Approximating KL divergence", 2020,
    http://joschu.net/blog/kl-approx.html):

    - k1 = -log r            unbiased, high variance, may be negative
    - k2 = (log r)^2 / 2     biased, low variance, never negative
    - k3 = (r - 1) - log r   unbiased, low variance, never negative

    That is about values, as in a reward. As a loss term, over the policy's own samples, the gradient of k2 is on
    average that of KL(policy || reference), k3's that of KL(reference || policy), and k1's zero.

    In k3, log r is clamped from above at 20 to keep r finite; beyond it k3 is constant and has no gradient. Nothing is
    clamped below (where k3 grows only linearly), and k1 and k2 are not clamped at all.

    Args:
        logprobs: any shape, nats; the gradient flows through it.
        ref_logprobs: same shape, nats.
        estimator: "k1", "k2" or "k3".

    Returns:
        The estimate in nats, of the same shape.

    Raises:
        ValueError: for an unknown estimator.
    """
    log_r = ref_logprobs - logprobs
    if estimator == "k1":
        return -log_r
    if estimator == "k2":
        return log_r.square() / 2
    if estimator == "k3":
        log_r = log_r.clamp(max=MAX_LOG_RATIO)
        # expm1, because r - 1 loses every digit where policy and reference nearly agree, which is the usual case.
        return log_r.expm1() - log_r
    raise ValueError(f"estimator is {estimator!r}; use one of {', '.join(ESTIMATORS)}")


@dataclass(frozen=True)
class KLController:
    """The coefficient of the KL penalty: fixed, or steered towards a target KL.

    Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (arXiv:1909.08593), section 2.2:
    e = clip((KL - target) / target, -0.2, 0.2), coef <- coef * (1 + K e). As in its code, K = num_sequences / horizon,
    so that the speed of adaptation does not depend on the batch size.

    Args:
        coef: the coefficient now, >= 0.
        target: the wanted KL, > 0, in whatever unit `updated` observes (nats a token or nats a sequence); None: fixed.
        horizon: > 0, sequences over which a KL far off its target moves the coefficient by about 20%.

    Raises:
        ValueError: if coef is negative, or target or horizon is not positive.
    """

    coef: float
    target: float | None = None
    horizon: int = 10000

    def __post_init__(self) -> None:
        if not (math.isfinite(self.coef) and self.coef >= 0):
            raise ValueError(f"coef is {self.coef}; it must be a number >= 0")
        if self.target is not None and not (math.isfinite(self.target) and self.target > 0):
            raise ValueError(f"target is {self.target}; it must be a number > 0, or None for a fixed coefficient")
        if self.horizon <= 0:
            raise ValueError(f"horizon is {self.horizon}; it must be > 0")

    def updated(self, observed_kl: float, num_sequences: int) -> KLController:
        """The controller after one batch of `num_sequences` rows whose mean KL was `observed_kl`.

        Raises:
            ValueError: if observed_kl is not finite, or the batch is so large against the horizon (5 times it or more)
                that one update could turn the coefficient to zero or below.
        """
        if self.target is None:
            return self
        if not math.isfinite(observed_kl):
            raise ValueError(f"observed_kl is {observed_kl}; the KL coefficient cannot follow it")
        if num_sequences >= 5 * self.horizon:
            raise ValueError(
                f"horizon is {self.horizon}, too short for {num_sequences} sequences a batch: "
                f"the coefficient could turn negative; set horizon above {num_sequences // 5}"
            )
        error = min(max((observed_kl - self.target) / self.target, -0.2), 0.2)
        return replace(self, coef=self.coef * (1 + error * num_sequences / self.horizon))
