"""How much of the returns the critic foresaw, for the log."""

from __future__ import annotations

from torch import Tensor


def explained_variance(values_n: Tensor, returns_n: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns): 1 is a perfect critic, 0 a constant one; float64 inside.

    Returns 0.0 where the returns are constant (to float32 rounding) or there are none: nothing is there to explain, and
    a quotient of two roundings would only spoil the plot.
    """
    values_n, returns_n = values_n.double(), returns_n.double()
    if returns_n.numel() == 0:
        return 0.0
    variance = returns_n.var(correction=0)
    if variance <= 1e-12 * returns_n.square().mean():
        return 0.0
    return (1 - (returns_n - values_n).var(correction=0) / variance).item()
