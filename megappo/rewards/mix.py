"""One score from what functions, a reward model and the length penalty say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

from megappo.config import RewardConfig
from megappo.data import batch
from megappo.rewards.resolve import RewardError, check_sources

PARTS = {"score_function": "function", "score_model": "model", "score_length": "length_penalty"}
"""Columns of the parts of a score, before weights, and their names in ``reward/<name>/mean``; nan for none."""


def check_covered(sources: Iterable[str], reward: RewardConfig) -> list[str]:
    """The data sources that functions score.

    Raises:
        RewardError: one that nothing scores.
    """
    bare = [source for source in sources if reward.weights_of(source) == type(reward.weights)(function=0.0, model=0.0)]
    if bare and reward.pool is None:
        check_sources(bare, reward.function is not None, reward.by_source)
    if bare:
        raise RewardError(
            f"no reward for data_source {', '.join(map(repr, bare))}: give a weight that is not 0 to what scores it, "
            "in roles.reward.weights or weights_by_source"
        )
    return [source for source in sources if reward.weights_of(source).function]


def is_plain(reward: RewardConfig) -> bool:
    """Whether scores are what functions return."""
    weights = [reward.weights, *reward.weights_by_source.values()]
    unweighted = all(each.function == 1.0 for each in weights)
    return reward.pool is None and unweighted and not reward.length_penalty.per_token


def mix(
    functions: pa.Table,
    models: pa.Table | None,
    sources: Sequence[str],
    response_tokens: np.ndarray,
    reward: RewardConfig,
) -> pa.Table:
    """Scores of a batch.

    A row counts as failed, and as 0, if any of its parts failed.

    Args:
        functions: a row for each response: ``id``, ``score`` float32, ``failed`` bool, ``failure`` string, whatever
            else shall stay, and perhaps ``token_scores`` (see :func:`megappo.rewards.manager.RewardManager.score`).
        models: ``id``, ``score_model`` float32 and ``failure_model`` string of the rows that a model scored; None if
            there are none.
        sources: data source of each row of ``functions``.
        response_tokens: int64, of each row.

    Returns:
        ``functions`` with the whole ``score``, ``failed`` and ``failure``, and the parts as columns (:data:`PARTS`).
        Which columns there are follows from the configuration alone, so that batches can be joined.
    """
    weights = {source: reward.weights_of(source) for source in set(sources)}
    by_function = np.array([weights[source].function for source in sources])
    by_model = np.array([weights[source].model for source in sources])
    failures = functions.column("failure").to_pylist()
    said = batch.column(functions, "score").astype(np.float64)
    score = by_function * said
    parts = {"score_function": np.where(by_function != 0, said, np.nan)}
    judged = np.full(len(said), np.nan)
    if models is not None:
        rows = {row: at for at, row in enumerate(batch.column(functions, "id").tolist())}
        at = np.array([rows[row] for row in batch.column(models, "id").tolist()], dtype=np.int64)
        judged[at] = batch.column(models, "score_model")
        for row, why, value in zip(at, models.column("failure_model").to_pylist(), judged[at], strict=True):
            failures[row] = failures[row] or why or ("" if np.isfinite(value) else f"the reward model gave {value}")
        score = score + np.where(by_model != 0, by_model * judged, 0.0)
    if reward.pool is not None:
        parts["score_model"] = judged
    if penalty := reward.length_penalty.per_token:
        parts["score_length"] = -penalty * np.maximum(response_tokens - reward.length_penalty.after, 0)
        score = score + parts["score_length"]
    failed = np.array([bool(why) for why in failures], dtype=bool)
    out = functions.drop_columns(["score", "failed", "failure"])
    out = out.append_column("score", pa.array(np.where(failed, 0.0, score).astype(np.float32)))
    out = out.append_column("failed", pa.array(failed)).append_column("failure", pa.array(failures, pa.string()))
    for name, values in parts.items():
        out = out.append_column(name, pa.array(np.where(failed, 0.0, values).astype(np.float32)))
    if "token_scores" in out.column_names:
        lengths = batch.lengths(out, "token_scores")
        tokens = batch.flat(out, "token_scores") * np.where(failed, 0.0, by_function).repeat(lengths)
        at = out.column_names.index("token_scores")
        out = out.set_column(at, "token_scores", batch.ragged(tokens.astype(np.float32), lengths))
    return out
