"""Statistics over masked tokens, as plain floats for the log. float64 inside; NaN where nothing is masked in."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def masked_mean(x: Tensor, mask: Tensor | None = None) -> float:
    """Mean over the tokens with mask 1 (all, without a mask); any shape."""
    selected = _selected(x, mask)
    return selected.mean().item() if selected.numel() else math.nan


def masked_min(x: Tensor, mask: Tensor | None = None) -> float:
    """Smallest value among the tokens with mask 1; any shape."""
    selected = _selected(x, mask)
    return selected.min().item() if selected.numel() else math.nan


def masked_max(x: Tensor, mask: Tensor | None = None) -> float:
    """Largest value among the tokens with mask 1; any shape."""
    selected = _selected(x, mask)
    return selected.max().item() if selected.numel() else math.nan


def masked_std(x: Tensor, mask: Tensor | None = None) -> float:
    """Standard deviation (population: divided by n) over the tokens with mask 1; 0 for a single token; any shape."""
    selected = _selected(x, mask)
    return selected.std(correction=0).item() if selected.numel() else math.nan


def summary(x: Tensor, mask: Tensor | None = None) -> dict[str, float]:
    """{"mean", "max", "min"} over the tokens with mask 1: the three that verl's dashboards show of most columns."""
    return {"mean": masked_mean(x, mask), "max": masked_max(x, mask), "min": masked_min(x, mask)}


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor | None = None) -> float:
    """1 - Var(returns - values) / Var(returns) over the tokens with mask 1: 1 is a perfect critic, 0 a constant one.

    Returns 0.0 where the returns are constant (to float32 rounding) or there are none: nothing is there to explain, and
    a quotient of two roundings would only spoil the plot.
    """
    selected_returns = _selected(returns, mask)
    if selected_returns.numel() == 0:
        return 0.0
    variance = selected_returns.var(correction=0)
    if variance <= 1e-12 * selected_returns.square().mean():
        return 0.0
    residual_variance = (selected_returns - _selected(values, mask)).var(correction=0)
    return (1 - residual_variance / variance).item()


def _selected(x: Tensor, mask: Tensor | None) -> Tensor:
    x = x.detach().to(torch.float64)
    return x.reshape(-1) if mask is None else x[mask.bool()]
