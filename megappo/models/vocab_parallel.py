"""Log-probability and entropy of tokens when each rank holds a slice of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

CHUNK_TOKENS = 1024
"""Tokens whose logits are held in float32 at a time."""


def token_logprobs(
    logits_tv: torch.Tensor,
    rows_n: torch.Tensor,
    targets_n: torch.Tensor,
    *,
    vocab_size: int,
    temperature: float,
    group: dist.ProcessGroup,
    with_entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(logits / temperature) at the targets, and the entropy of that distribution; both differentiable.

    Logits stay in their own dtype; float32 copies exist for :data:`CHUNK_TOKENS` rows at a time, also in the backward
    pass, which recomputes the probabilities.

    Args:
        logits_tv: [tokens, padded vocabulary / tp], this rank's slice; padding columns are left out of the softmax.
        rows_n: int64 [n], the rows to evaluate, each at most once.
        targets_n: int64 [n], a token id for each.
        vocab_size: real size of the vocabulary.
        temperature: divisor of the logits, > 0.
        group: the tensor-parallel group.
        with_entropy: compute entropies; else they come back as zeros.

    Returns:
        (logprobs_n, entropies_n) in float32 (float64 for float64 logits), equal on all ranks of the group, in nats.
    """
    return _TokenLogprobs.apply(logits_tv, rows_n, targets_n, vocab_size, temperature, group, with_entropy)


def _chunk(
    logits_tv: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor, valid: int, first: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scaled logits of some rows, the targets' local columns, and whether each target is in this rank's slice."""
    dtype = torch.float64 if logits_tv.dtype == torch.float64 else torch.float32
    scaled_cv = logits_tv[rows, :valid].to(dtype) / temperature
    local = targets - first
    here = (local >= 0) & (local < valid)
    return scaled_cv, local.clamp(0, max(valid - 1, 0)), here


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_tv: torch.Tensor,
        rows_n: torch.Tensor,
        targets_n: torch.Tensor,
        vocab_size: int,
        temperature: float,
        group: dist.ProcessGroup,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width, alone = logits_tv.shape[1], group.size() == 1
        first = group.rank() * width
        valid = min(max(vocab_size - first, 0), width)
        logprobs, entropies, peaks, log_sums = [], [], [], []
        for rows, targets in zip(rows_n.split(CHUNK_TOKENS), targets_n.split(CHUNK_TOKENS), strict=True):
            z_cv, local, here = _chunk(logits_tv, rows, targets, valid, first, temperature)
            peak = z_cv.max(dim=1).values if valid else z_cv.new_full((len(rows),), -torch.inf)
            if not alone:
                dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
            z_cv -= peak[:, None]  # sums of shifted logits keep their digits, however large the logits are
            at_target = z_cv.gather(1, local[:, None])[:, 0] if valid else torch.zeros_like(peak)
            e_cv = z_cv.exp()
            sums = torch.stack([e_cv.sum(1), torch.where(here, at_target, 0.0), (e_cv * z_cv).sum(1)])
            if not alone:
                dist.all_reduce(sums, group=group)
            log_sum = sums[0].log()
            logprobs.append(sums[1] - log_sum)
            entropies.append(log_sum - sums[2] / sums[0] if with_entropy else torch.zeros_like(log_sum))
            peaks.append(peak)
            log_sums.append(log_sum)
        logprobs_n, entropies_n = torch.cat(logprobs), torch.cat(entropies)
        ctx.save_for_backward(logits_tv, rows_n, targets_n, torch.cat(peaks), torch.cat(log_sums), entropies_n)
        ctx.settings = (valid, first, temperature, with_entropy)
        return logprobs_n, entropies_n

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        grad_logprobs_n, grad_entropies_n = grads
        logits_tv, rows_n, targets_n, peaks_n, log_sums_n, entropies_n = ctx.saved_tensors
        valid, first, temperature, with_entropy = ctx.settings
        grad_tv = torch.zeros_like(logits_tv)
        for at in torch.arange(len(rows_n), device=rows_n.device).split(CHUNK_TOKENS):
            z_cv, local, here = _chunk(logits_tv, rows_n[at], targets_n[at], valid, first, temperature)
            log_p_cv = z_cv - peaks_n[at, None] - log_sums_n[at, None]
            p_cv = log_p_cv.exp()
            grad_cv = -p_cv * grad_logprobs_n[at, None]
            if valid:
                grad_cv.scatter_add_(1, local[:, None], (grad_logprobs_n[at] * here)[:, None])
            if with_entropy:
                grad_cv -= p_cv * (log_p_cv + entropies_n[at, None]) * grad_entropies_n[at, None]
            grad_tv[rows_n[at], :valid] = (grad_cv / temperature).to(grad_tv.dtype)
        return grad_tv, None, None, None, None, None, None
