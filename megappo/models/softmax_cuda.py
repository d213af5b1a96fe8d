"""The two passes over a chunk of logits that a log-probability and its gradient need, as Triton kernels.

Each reads the logits once, in their own dtype, and computes in float32; torch would make a dozen passes over float32
copies. Used on CUDA only; :mod:`megappo.models.softmax_torch` has the same in torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def _statistics(logits, targets, peaks, sums, columns, stride, inverse_temperature, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    peak = float("-inf")
    total = 0.0
    weighted = 0.0
    at_target = 0.0
    for begin in range(0, columns, block):
        at = begin + tl.arange(0, block)
        z = tl.load(logits + row * stride + at, mask=at < columns, other=float("-inf")).to(tl.float32)
        z = z * inverse_temperature
        new_peak = tl.maximum(peak, tl.max(z, 0))
        shifted = z - new_peak
        e = tl.where(at < columns, tl.exp(shifted), 0.0)
        lowered = peak - new_peak
        scale = tl.where(peak == float("-inf"), 0.0, tl.exp(lowered))
        # The earlier sums were taken against the earlier peak.
        weighted = tl.where(scale == 0.0, 0.0, scale * (weighted + lowered * total))
        weighted += tl.sum(tl.where(at < columns, e * shifted, 0.0), 0)
        total = scale * total + tl.sum(e, 0)
        at_target += tl.sum(tl.where((at == target) & (at < columns), z, 0.0), 0)
        peak = new_peak
    tl.store(peaks + row, peak)
    tl.store(sums + row * 3, total)
    tl.store(sums + row * 3 + 1, at_target)
    tl.store(sums + row * 3 + 2, weighted)


@triton.jit
def _gradients(  # type: ignore[no-untyped-def]
    logits,
    targets,
    peaks,
    log_sums,
    entropies,
    grad_logprobs,
    grad_entropies,
    columns,
    stride,
    inverse_temperature,
    with_entropy: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    peak, log_sum = tl.load(peaks + row), tl.load(log_sums + row)
    grad_logprob = tl.load(grad_logprobs + row)
    at = tl.program_id(1) * block + tl.arange(0, block)
    place = logits + row * stride + at
    z = tl.load(place, mask=at < columns, other=0.0).to(tl.float32) * inverse_temperature
    log_p = (z - peak) - log_sum  # in this order: a large peak would swallow the digits of the sum
    slope = grad_logprob
    if with_entropy:
        slope += tl.load(grad_entropies + row) * (log_p + tl.load(entropies + row))
    grad = tl.where(at == target, grad_logprob, 0.0) - tl.exp(log_p) * slope
    tl.store(place, (grad * inverse_temperature).to(logits.dtype.element_ty), mask=at < columns)


def softmax_statistics(
    logits_cv: torch.Tensor, targets_c: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a softmax of scaled logits z needs, over this rank's columns.

    Args:
        logits_cv: [chunk, columns], contiguous in columns.
        targets_c: int64 [chunk], a local column, or one outside if the target is elsewhere.

    Returns:
        (peaks_c, sums_c3) in float32: max z, and the sums of exp(z - peak), z at the target, (z - peak) exp(z - peak).
    """
    rows, columns = logits_cv.shape
    peaks_c = torch.empty(rows, device=logits_cv.device, dtype=torch.float32)
    sums_c3 = torch.empty(rows, 3, device=logits_cv.device, dtype=torch.float32)
    if rows and columns:
        _statistics[(rows,)](
            logits_cv, targets_c, peaks_c, sums_c3, columns, logits_cv.stride(0), 1.0 / temperature, block=BLOCK
        )
    else:
        peaks_c.fill_(-torch.inf)
        sums_c3.zero_()
    return peaks_c, sums_c3


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
        peaks_c, log_sums_c: max z over the whole vocabulary, and log of the sum of exp(z - peak), float32.
        entropies_c: of each token's distribution, float32.
        grad_logprobs_c, grad_entropies_c: of the loss with respect to each token's results, float32.
    """
    rows, columns = logits_cv.shape
    if rows and columns:
        _gradients[(rows, triton.cdiv(columns, BLOCK))](
            logits_cv,
            targets_c,
            peaks_c,
            log_sums_c,
            entropies_c,
            grad_logprobs_c.contiguous(),
            entropies_c if grad_entropies_c is None else grad_entropies_c.contiguous(),
            columns,
            logits_cv.stride(0),
            1.0 / temperature,
            with_entropy=grad_entropies_c is not None,
            block=BLOCK,
        )
    return logits_cv
