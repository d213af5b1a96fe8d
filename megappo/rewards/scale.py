"""Normalisation and clipping of scores before they become token rewards."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from megappo.config import RewardConfig
from megappo.data import batch

EPSILON = 1e-6


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared differences from the mean, of all scores so far."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def updated(self, values: np.ndarray) -> Moments:
        """With more values; Chan, Golub and LeVeque (1979), eq. 2.1."""
        if not len(values):
            return self
        count, mean = self.count + len(values), float(values.mean())
        squares = float(((values - mean) ** 2).sum())
        gap = mean - self.mean
        return Moments(
            count,
            self.mean + gap * len(values) / count,
            self.squares + squares + gap**2 * self.count * len(values) / count,
        )

    @property
    def std(self) -> float:
        """Standard deviation, unbiased; 1 where there are too few values, or they do not differ."""
        deviation = (self.squares / (self.count - 1)) ** 0.5 if self.count > 1 else 0.0
        return deviation if deviation > EPSILON else 1.0


def scaled(rows: pa.Table, reward: RewardConfig, moments: Moments) -> tuple[pa.Table, Moments]:
    """Rows with scores as credit assignment shall see them, and the moments for the next step.

    Rows whose reward failed take no part, and stay at 0.

    Args:
        rows: ``score`` float32, ``failed`` bool, and perhaps ``baseline`` with ``baseline_failed``, which are treated
            alike, and ``token_scores``, which are divided alike.
        moments: of the steps before; used, and updated first, where ``normalize`` is ``running``.
    """
    if reward.normalize == "none" and reward.clip is None:
        return rows, moments
    scores, failed = batch.column(rows, "score").astype(np.float64), batch.column(rows, "failed").astype(bool)
    shift, scale = 0.0, 1.0
    if reward.normalize != "none":
        known = (moments if reward.normalize == "running" else Moments()).updated(scores[~failed])
        shift, scale = known.mean, known.std
        moments = known if reward.normalize == "running" else moments
    values = np.where(failed, 0.0, _clipped((scores - shift) / scale, reward.clip))
    rows = _replaced(rows, "score", pa.array(values.astype(np.float32)))
    if "baseline" in rows.column_names:
        without = batch.column(rows, "baseline_failed").astype(bool)
        baseline = np.where(without, 0.0, _clipped((batch.column(rows, "baseline") - shift) / scale, reward.clip))
        rows = _replaced(rows, "baseline", pa.array(baseline.astype(np.float32)))
    if "token_scores" in rows.column_names:
        tokens = (batch.flat(rows, "token_scores") / scale).astype(np.float32)
        rows = _replaced(rows, "token_scores", batch.ragged(tokens, batch.lengths(rows, "token_scores")))
    return rows, moments


def _clipped(values: np.ndarray, size: float | None) -> np.ndarray:
    return values if size is None else values.clip(-size, size)


def _replaced(rows: pa.Table, name: str, values: pa.Array) -> pa.Table:
    return rows.set_column(rows.column_names.index(name), name, values)
