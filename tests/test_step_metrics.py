"""A step's numbers against values worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pytest

from megappo.cluster.calls import Place, Span
from megappo.data import batch
from megappo.report.step_metrics import BATCH_COLUMNS, batch_metrics, busy_seconds, time_metrics


def ragged(*rows: list[float]) -> pa.ListArray:
    return batch.ragged(np.concatenate(rows).astype(np.float32), [len(row) for row in rows])


def rows() -> pa.Table:
    return pa.table(
        {
            "id": [0, 1],
            "prompt_ids": pa.array([[1, 2, 3, 4], [1, 2]], pa.list_(pa.int32())),
            "response_ids": pa.array([[5, 6, 7], [8]], pa.list_(pa.int32())),
            "finish_reason": ["length", "stop"],
            "score": pa.array([1.0, 0.0], pa.float32()),
            "failed": [False, True],
            "data_source": ["a", "a"],
            "extras": ['{"acc": 1, "format": 0.5}', "{}"],
            "rewards": ragged([-0.5, 0.0, 1.0], [-0.25]),
            "advantages": ragged([1.0, -2.0, 3.0], [-1.0]),
            "values": ragged([0.0, 1.0, 2.0], [1.0]),
            "returns": ragged([1.0, 1.0, 3.0], [3.0]),
            "logprobs": ragged([-1.0, -2.0, -3.0], [-4.0]),
            "rollout_logprobs": ragged([-1.5, -2.0, -3.0], [-3.5]),
        }
    )


def test_tokens_that_the_policy_did_not_produce_are_in_the_lengths_only() -> None:
    """The same figures as without them, whatever stands at their places."""
    mask = pa.array([[1, 0, 1], [1]], pa.list_(pa.int8()))
    per_token = ("rewards", "advantages", "values", "returns", "logprobs", "rollout_logprobs")
    masked, cut = rows().append_column("loss_mask", mask), rows()
    for name in per_token:
        kept = [[row[0], row[2]] if len(row) == 3 else row.tolist() for row in batch.split_rows(cut, name)]
        cut = cut.set_column(cut.column_names.index(name), name, ragged(*kept))
        middle = 0.0 if name == "rewards" else 1e6
        spoilt = [[kept[0][0], middle, kept[0][1]], kept[1]]
        masked = masked.set_column(masked.column_names.index(name), name, ragged(*spoilt))
    cut = cut.set_column(2, "response_ids", pa.array([[5, 7], [8]], pa.list_(pa.int32())))
    found, expected = batch_metrics(masked, 4, 3), batch_metrics(cut, 4, 3)
    assert found.pop("response_length/produced_ratio") == 0.75
    assert found["response_length/mean"] == 2.0
    lengths = {"response_length/mean", "response_length/max", "perf/total_num_tokens"}
    assert {k: v for k, v in found.items() if k not in lengths} == {
        k: v for k, v in expected.items() if k not in lengths
    }


def test_responses_that_do_not_train_are_in_no_advantages_and_values() -> None:
    found, whole = batch_metrics(rows(), 4, 3, mask_truncated=True), batch_metrics(rows(), 4, 3)
    assert (found["critic/advantages/max"], found["critic/returns/mean"], found["critic/values/min"]) == (
        -1.0,
        3.0,
        1.0,
    )
    others = {name for name in whole if found[name] == whole[name]}
    of_training = ("critic/advantages", "critic/returns", "critic/values", "critic/vf")
    assert {name for name in whole if not name.startswith(of_training)} <= others


def test_batch_metrics() -> None:
    found = batch_metrics(rows().select(BATCH_COLUMNS), max_prompt=4, max_response=3)
    expected = {
        "critic/score/mean": 0.5,
        "critic/score/max": 1.0,
        "critic/rewards/mean": 0.125,  # sums of rows: 0.5 and -0.25
        "critic/rewards/min": -0.25,
        "critic/advantages/mean": 0.25,  # over tokens, not rows
        "critic/advantages/max": 3.0,
        "critic/returns/mean": 2.0,
        "critic/values/min": 0.0,
        # Var(returns) = 1; returns - values = (1, 0, 1, 2), of variance 1/2
        "critic/vf_explained_var": 0.5,
        "response_length/mean": 2.0,
        "response_length/clip_ratio": 0.5,
        "prompt_length/mean": 3.0,
        "prompt_length/clip_ratio": 0.5,
        "reward/failed_rows": 1.0,
        "perf/total_num_tokens": 10.0,
        # |e^-1.5 - e^-1| = 0.144749 and |e^-3.5 - e^-4| = 0.0118817, over four tokens
        "training/rollout_probs_diff_mean": 0.03915775,
        "training/rollout_probs_diff_max": 0.1447493,
        "training/rollout_logprobs_diff_mean": 0.25,
        "training/rollout_logprobs_diff_max": 0.5,
        "reward/acc/mean": 0.5,  # the second row failed, and counts as 0
        "reward/format/mean": 0.25,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_constant_returns_explain_nothing() -> None:
    table = rows().drop_columns(["returns"]).append_column("returns", ragged([1.0, 1.0, 1.0], [1.0]))
    assert batch_metrics(table, 4, 3)["critic/vf_explained_var"] == 0.0


@dataclass(frozen=True)
class Interval:
    began: float
    ended: float


def test_busy_seconds_is_the_union() -> None:
    assert busy_seconds([]) == 0
    assert busy_seconds([Interval(5, 7), Interval(0, 2), Interval(1, 3), Interval(1, 1.5)]) == pytest.approx(5)


def test_time_metrics() -> None:
    def span(role: str, rank: int, pool: str, method: str, began: float, ended: float) -> Span:
        return Span(Place(role, rank, pool, "node", "log"), method, 100 + began, 100 + ended)

    found = time_metrics(
        [
            span("rollout", 0, "serve", "generate", 0, 2),
            span("actor", 0, "train", "score", 2, 4),
            span("actor", 1, "train", "score", 2.5, 5),
            span("critic", 0, "value", "update", 5, 9),
            span("actor", 0, "train", "update", 5, 8),
            span("rollout", 0, "serve", "probe", 9, 9.5),
        ],
        step_s=10,
    )
    assert found == pytest.approx(
        {
            "timing_s/gen": 2,
            "timing_s/old_log_prob": 3,
            "timing_s/update_critic": 4,
            "timing_s/update_actor": 3,
            "perf/busy_share/serve": 0.25,
            "perf/busy_share/train": 0.6,
            "perf/busy_share/value": 0.4,
            "perf/idle_share/serve": 0.75,
            "perf/idle_share/train": 0.4,
            "perf/idle_share/value": 0.6,
            "perf/driver_share": 0.05,
        }
    )
