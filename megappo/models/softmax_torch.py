"""The two passes over a chunk of logits that a log-probability and its gradient need, in torch.

:mod:`megappo.models.softmax_cuda` has the same as kernels.
"""

from __future__ import annotations

import torch


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that is computed in: float32, or float64 for float64 input."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def softmax_statistics(
    logits_cv: torch.Tensor, targets_c: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a softmax of scaled logits z needs, over this rank's columns.

    Args:
        logits_cv: [chunk, columns].
        targets_c: int64 [chunk], a local column, or one outside if the target is elsewhere.

    Returns:
        (peaks_c, sums_c3) in float32: max z, and the sums of exp(z - peak), z at the target, (z - peak) exp(z - peak).
    """
    z_cv = logits_cv.to(wide(logits_cv.dtype)) / temperature
    if z_cv.shape[1] == 0:
        return z_cv.new_full((len(z_cv),), -torch.inf), z_cv.new_zeros(len(z_cv), 3)
    here_c, local_c = _local(targets_c, z_cv.shape[1])
    at_target_c = torch.where(here_c, z_cv.gather(1, local_c[:, None])[:, 0], 0.0)
    peaks_c = z_cv.max(dim=1).values
    z_cv = z_cv.sub_(peaks_c[:, None])
    e_cv = z_cv.exp()
    return peaks_c, torch.stack([e_cv.sum(1), at_target_c, torch.linalg.vecdot(e_cv, z_cv)], dim=1)


def logit_gradients_(
    logits_cv: torch.Tensor,
    targets_c: torch.Tensor,
    peaks_c: torch.Tensor,
    log_sums_c: torch.Tensor,
    entropies_c: torch.Tensor,
    grad_logprobs_c: torch.Tensor,
    grad_entropies_c: torch.Tensor | None,
    temperature: float,
) -> torch.Tensor:
    """Replace logits by the gradient of a loss with respect to them, in place.

    Args:
        peaks_c, log_sums_c: max z over the whole vocabulary, and log of the sum of exp(z - peak).
        entropies_c: of each token's distribution.
        grad_logprobs_c, grad_entropies_c: of the loss with respect to each token's results.
    """
    log_p_cv = logits_cv.to(wide(logits_cv.dtype)) / temperature
    if log_p_cv.shape[1] == 0:
        return logits_cv
    log_p_cv = log_p_cv.sub_(peaks_c[:, None]).sub_(log_sums_c[:, None])
    if grad_entropies_c is None:
        grad_cv = log_p_cv.exp_().mul_(-grad_logprobs_c[:, None])
    else:
        p_cv = log_p_cv.exp()
        slope_cv = log_p_cv.add_(entropies_c[:, None]).mul_(grad_entropies_c[:, None]).add_(grad_logprobs_c[:, None])
        grad_cv = slope_cv.mul_(p_cv).neg_()
    here_c, local_c = _local(targets_c, grad_cv.shape[1])
    grad_cv.scatter_add_(1, local_c[:, None], (grad_logprobs_c * here_c)[:, None])
    return logits_cv.copy_(grad_cv.div_(temperature))


def _local(targets_c: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each target is here, and a column that is safe to index."""
    return (targets_c >= 0) & (targets_c < columns), targets_c.clamp(0, columns - 1)
