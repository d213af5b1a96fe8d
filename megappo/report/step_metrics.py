"""A step's metrics, by the names that verl's dashboards know."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import torch

from megappo.data import batch
from megappo.data.loss_mask import LOSS_MASK, flat_mask, was_cut
from megappo.ppo.explained_variance import explained_variance
from megappo.report.reward_extras import reward_extras

Metrics = dict[str, float]


class Interval(Protocol):
    """When something ran, in Unix seconds."""

    @property
    def began(self) -> float: ...

    @property
    def ended(self) -> float: ...


def summary(name: str, values: np.ndarray) -> Metrics:
    """mean, max and min under ``name/``; nothing for no values."""
    if len(values) == 0:
        return {}
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def batch_metrics(rows: pa.Table, max_prompt: int, max_response: int, *, mask_truncated: bool = False) -> Metrics:
    """Metrics of a training batch.

    Lengths, scores, rewards, advantages, returns, values; how far the engine's probabilities of its own tokens are from
    the trainer's; how many rewards failed; ``reward/<name>/mean`` of what reward functions returned beside the score;
    the mean score of greedy responses where they are the baseline; and with ``loss_mask`` the share of response tokens
    that the policy produced. Tokens of others are in the lengths only.

    Args:
        mask_truncated: responses that were cut do not train: advantages, returns and values are those of the others.
    """
    prompts, responses = batch.lengths(rows, "prompt_ids"), batch.lengths(rows, "response_ids")
    rewards = np.array([row.sum() for row in batch.split_rows(rows, "rewards")])
    mask = flat_mask(rows, "response_ids")
    cut = was_cut(rows)
    trained = mask & ~cut.repeat(responses) if mask_truncated else mask
    out = {
        **summary("critic/score", batch.column(rows, "score")),
        **summary("critic/rewards", rewards),
        **summary("critic/advantages", batch.flat(rows, "advantages")[trained]),
        **_value_metrics(rows, trained),
        **summary("response_length", responses),
        "response_length/clip_ratio": float(cut.mean()),
        **summary("prompt_length", prompts),
        "prompt_length/clip_ratio": float((prompts >= max_prompt).mean()),
        "reward/failed_rows": float(batch.column(rows, "failed").sum()),
        "perf/total_num_tokens": float(prompts.sum() + responses.sum()),
    }
    engine, trainer = batch.flat(rows, "rollout_logprobs")[mask], batch.flat(rows, "logprobs")[mask]
    for name, gap in (("probs", np.exp(engine) - np.exp(trainer)), ("logprobs", engine - trainer)):
        out[f"training/rollout_{name}_diff_mean"] = float(np.abs(gap).mean())
        out[f"training/rollout_{name}_diff_max"] = float(np.abs(gap).max())
    if engine.std() > 0 and trainer.std() > 0:
        out["training/rollout_actor_probs_pearson_corr"] = float(np.corrcoef(np.exp(engine), np.exp(trainer))[0, 1])
    if "baseline" in rows.column_names:
        out["reward/baseline/mean"] = float(batch.column(rows, "baseline").mean())
    if LOSS_MASK in rows.column_names:
        out["response_length/produced_ratio"] = float(mask.mean())
    for name, extra in reward_extras(rows).items():
        if not np.isnan(extra).all():
            out[f"reward/{name}/mean"] = float(np.nanmean(extra))
    return out


def _value_metrics(rows: pa.Table, mask: np.ndarray) -> Metrics:
    """Of the critic; nothing where there is none."""
    if "values" not in rows.column_names:
        return {}
    values, returns = batch.flat(rows, "values")[mask], batch.flat(rows, "returns")[mask]
    return {
        **summary("critic/returns", returns),
        **summary("critic/values", values),
        "critic/vf_explained_var": explained_variance(torch.tensor(values), torch.tensor(returns)),
    }


BATCH_COLUMNS = (
    *("prompt_ids", "response_ids", "finish_reason", "score", "failed", "extras", "data_source"),
    *("rollout_logprobs", "logprobs", "values", "rewards", "advantages", "returns"),
)
"""What :func:`batch_metrics` reads, besides ``loss_mask`` and ``baseline``; a batch without a critic has no values and
returns."""


def staleness_metrics(rows: pa.Table, step: int) -> Metrics:
    """By how many updates the weights that drew a batch are older than those that train on it.

    Args:
        rows: ``weight_version``, of the weights that each response was begun with; and ``last_weight_version``, where
            others may have gone on with it: the share of such responses is ``staleness/partial_share``.
        step: that trains on them, which is the version of its weights.
    """
    first = batch.column(rows, "weight_version")
    out = {"staleness/mean": float((step - first).mean()), "staleness/max": float((step - first).max())}
    if "last_weight_version" in rows.column_names:
        out["staleness/partial_share"] = float((batch.column(rows, "last_weight_version") != first).mean())
    return out


def busy_seconds(intervals: Iterable[Interval]) -> float:
    """Length of the union of intervals, in seconds."""
    total, until = 0.0, -np.inf
    for began, ended in sorted((interval.began, interval.ended) for interval in intervals):
        total += max(ended - max(began, until), 0.0)
        until = max(until, ended)
    return total


PHASES: Mapping[tuple[str, str], str] = {
    ("rollout", "generate"): "gen",
    ("rollout", "stream"): "gen",
    ("reward", "run_functions"): "reward",
    ("reward", "score"): "reward_model",
    ("actor", "score"): "old_log_prob",
    ("reference", "score"): "ref",
    ("critic", "score"): "values",
    ("critic", "update"): "update_critic",
    ("actor", "update"): "update_actor",
    ("actor", "send_weights"): "update_weights",
    ("rollout", "receive_weights"): "update_weights",
    ("rollout", "receive_shared"): "update_weights",
    ("rollout", "sleep"): "sleep",
    ("actor", "rest"): "offload",
    ("actor", "settle"): "offload",
    ("rollout", "wake"): "wake",
}
"""(role, method) of a remote call: the phase whose time it is."""


def time_metrics(spans: Iterable[Any], step_s: float) -> Metrics:
    """Time of each phase (any of its workers is busy with it), busy and idle share of each pool, and the driver's.

    ``perf/device_memory_gb/<phase>`` is what was taken of the fullest device when a worker's turn ended.

    Args:
        spans: of :class:`megappo.cluster.calls.Span`.
        step_s: wall time of the step.
    """
    phases, pools, everything = defaultdict(list), defaultdict(list), []
    taken: dict[str, float] = {}
    for span in spans:
        everything.append(span)
        pools[span.place.pool].append(span)
        if phase := PHASES.get((span.place.role, span.method)):
            phases[phase].append(span)
            if span.device_memory_gib is not None:
                taken[phase] = max(taken.get(phase, 0.0), span.device_memory_gib)
    out = {f"timing_s/{phase}": busy_seconds(found) for phase, found in phases.items()}
    out.update({f"perf/device_memory_gb/{phase}": gib for phase, gib in taken.items()})
    for pool, found in pools.items():
        busy = busy_seconds(found) / step_s
        out |= {f"perf/busy_share/{pool}": busy, f"perf/idle_share/{pool}": max(1.0 - busy, 0.0)}
    out["perf/driver_share"] = max(1.0 - busy_seconds(everything) / step_s, 0.0)
    return out
