"""The critic's loss, per token and unreduced, and the weights that reduce any loss over a whole mini-batch.

A mini-batch is spread over data-parallel ranks and cut into micro-batches, so no loss function here takes a mean. The
loss of the mini-batch is the sum, over all its tokens wherever they are, of `aggregation_weights` times the loss of the
token: a sum does not care how its terms were grouped, so neither does the gradient.

Shape suffix _n: flat tokens of a packed micro-batch; any other equal shape works.
"""

from __future__ import annotations

import torch
from torch import Tensor

AGGREGATIONS = ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean")


def value_loss(
    values_n: Tensor, old_values_n: Tensor, returns_n: Tensor, *, clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared error of the critic, with the value kept near its old one, per token.

    0.5 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2): as OpenAI's baselines (ppo2), written down in
    Engstrom et al. (arXiv:2005.12729). With clip None: 0.5 (V - R)^2.

    Args:
        values_n: of the critic being trained; the gradient flows through it.
        old_values_n: of the critic before this step's updates.
        returns_n: the targets.
        clip: > 0, in the units of the values; None: no clip.

    Returns:
        (loss_n, stats): stats holds the detached `clipped` (1 where the clip raised the loss, verl's vf_clipfrac).

    Raises:
        ValueError: if clip is not positive.
    """
    if clip is not None and clip <= 0:
        raise ValueError(f"clip is {clip}; it must be > 0, or None for no clip")
    error_n = (values_n - returns_n).square()
    if clip is None:
        return 0.5 * error_n, {"clipped": torch.zeros_like(error_n)}
    near_n = torch.clamp(values_n, old_values_n - clip, old_values_n + clip)
    near_error_n = (near_n - returns_n).square()
    return 0.5 * torch.maximum(error_n, near_error_n), {"clipped": (near_error_n > error_n).to(error_n.dtype)}


def aggregation_weights(lengths_b: Tensor, *, total_rows: int, total_tokens: int, aggregation: str) -> Tensor:
    """The weight of every token of each row, for which the sum of weight * loss is the loss of the mini-batch.

    - token_mean: 1 / total_tokens. DAPO (arXiv:2503.14476), equation 8.
    - seq_mean_token_sum: 1 / total_rows. Dr. GRPO (arXiv:2503.20783), up to its constant.
    - seq_mean_token_mean: 1 / (total_rows * length). GRPO (arXiv:2402.03300), equation 3.

    Args:
        lengths_b: [b] integer, loss tokens of each row of this micro-batch.
        total_rows: rows of the whole mini-batch, over all ranks and micro-batches. verl leaves out rows without loss
            tokens; whether to count them is the caller's choice.
        total_tokens: loss tokens of the whole mini-batch, likewise.
        aggregation: one of the three names.

    Returns:
        [b] float32, on the device of `lengths_b`; 0 for a row without tokens.

    Raises:
        ValueError: for an unknown aggregation, or totals smaller than what `lengths_b` alone holds.
    """
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation is {aggregation!r}; use one of {', '.join(AGGREGATIONS)}")
    rows, tokens = int((lengths_b > 0).sum()), int(lengths_b.sum())
    if total_rows < rows or total_tokens < tokens:
        raise ValueError(
            f"total_rows={total_rows}, total_tokens={total_tokens} are below the {rows} rows, {tokens} tokens here; "
            "pass the totals of the whole mini-batch"
        )
    if rows == 0:
        return torch.zeros_like(lengths_b, dtype=torch.float32)
    if aggregation == "token_mean":
        denominators_b = torch.full_like(lengths_b, total_tokens, dtype=torch.float64)
    elif aggregation == "seq_mean_token_sum":
        denominators_b = torch.full_like(lengths_b, total_rows, dtype=torch.float64)
    else:
        denominators_b = total_rows * lengths_b.double()
    return torch.where(lengths_b > 0, 1 / denominators_b, 0.0).float()
