"""Validation metrics against every draw there is, every choice there is, and numbers worked out by hand."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

from megappo.metric_names import subset_sizes, wrong_samples
from megappo.report.validation_metrics import (
    best_of,
    canary_metrics,
    majority,
    pass_at,
    validation_metrics,
)


def validation(extras: list[str], failed: tuple[int, ...] = ()) -> pa.Table:
    return pa.table(
        {
            "data_source": ["a", "a", "a", "a", "b", "b"],
            "prompt_index": [0, 0, 1, 1, 2, 2],
            "response_ids": pa.array([[1], [1, 2], [1], [1], [1], [1]], pa.list_(pa.int32())),
            "score": pa.array([1, 0, 1, 1, 0.5, 0], pa.float32()),
            "extras": extras,
            "failed": [row in failed for row in range(6)],
        }
    )


def test_validation_without_accuracy_shows_the_reward() -> None:
    found = validation_metrics(validation([""] * 6))
    assert {name: value for name, value in found.items() if "@2/" not in name} == {
        "val-core/a/reward/mean@2": 0.75,
        "val-core/b/reward/mean@2": 0.25,
        "val-aux/a/reward/std@2": 0.25,  # 1/2 and 0
        "val-aux/b/reward/std@2": 0.25,
        "val-aux/a/response_length/mean@2": 1.25,
        "val-aux/b/response_length/mean@2": 1.0,
        "val-aux/a/failed_rows": 0,
        "val-aux/b/failed_rows": 0,
    }


def test_accuracy_comes_first_where_a_source_reports_it() -> None:
    found = validation_metrics(validation(['{"acc": 1}', '{"acc": 0}', "{}", '{"acc": 0}', "{}", ""]))
    assert found["val-core/a/acc/mean@2"] == pytest.approx(1 / 3)  # over the rows that have it
    assert found["val-aux/a/reward/mean@2"] == 0.75
    assert found["val-core/b/reward/mean@2"] == 0.25
    assert not any("nan" in str(value) for value in found.values())


def test_failed_rows_count_as_zero_in_what_their_source_reports() -> None:
    extras = ['{"acc": 1, "format": 1}', "{}", '{"acc": 1, "format": 0}', "{}", '{"reward": 9}', "{}"]
    found = validation_metrics(validation(extras, failed=(1, 3, 5)))
    assert found["val-core/a/acc/mean@2"] == 0.5
    assert found["val-aux/a/format/mean@2"] == 0.25
    assert found["val-aux/a/failed_rows"] == 2
    assert found["val-aux/b/failed_rows"] == 1
    assert found["val-core/b/reward/mean@2"] == 0.25  # the score, whatever a function calls its numbers
    assert not any(name.startswith(("val-core/b/acc", "val-aux/b/acc")) for name in found)


def test_a_source_whose_every_reward_failed_has_the_score_only() -> None:
    found = validation_metrics(validation(['{"acc": 1}'] * 4 + ["{}"] * 2, failed=(4, 5)))
    assert found["val-aux/b/failed_rows"] == 2
    assert "val-core/b/reward/mean@2" in found and "val-core/b/acc/mean@2" not in found


def test_one_sample_has_its_mean_only() -> None:
    table = validation(['{"acc": 1, "pred": "7"}'] * 6).take([0, 2, 4])
    assert validation_metrics(table) == {
        "val-core/a/acc/mean@1": 1.0,
        "val-aux/a/reward/mean@1": 1.0,
        "val-aux/a/response_length/mean@1": 1.0,
        "val-aux/a/failed_rows": 0,
        "val-core/b/acc/mean@1": 1.0,
        "val-aux/b/reward/mean@1": 0.5,
        "val-aux/b/response_length/mean@1": 1.0,
        "val-aux/b/failed_rows": 0,
    }


def test_several_samples_by_hand() -> None:
    """Two prompts of two samples: right and wrong, and right twice; of two draws a quarter are wrong both times."""
    right, wrong = '{"acc": 1, "pred": "7"}', '{"acc": 0, "pred": "8"}'
    found = validation_metrics(validation([right, wrong, right, right, wrong, wrong]))
    expected = {
        "val-core/a/acc/mean@2": 0.75,
        "val-aux/a/acc/std@2": 0.25,
        "val-core/a/acc/best@2/mean": (0.75 + 1) / 2,
        "val-core/a/acc/best@2/std": (0.75 * 0.25) ** 0.5 / 2,
        "val-aux/a/acc/worst@2/mean": (0.25 + 1) / 2,
        "val-core/a/acc/pass@2": 1.0,
        "val-core/b/acc/pass@2": 0.0,
        "val-core/b/acc/maj@2/mean": 0.0,
        "val-core/b/acc/maj@2/std": 0.0,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert found["val-core/a/acc/maj@2/mean"] == pytest.approx((0.5 + 1) / 2, abs=0.04)  # the first of two draws wins
    assert "val-aux/a/reward/pass@2" not in found
    assert found == validation_metrics(validation([right, wrong, right, right, wrong, wrong]))
    canary = canary_metrics(validation([right, wrong, right, right, wrong, wrong]))
    assert canary["canary/a/acc/pass@2"] == 1.0 and canary["canary/a/failed_rows"] == 0
    assert len(canary) == len(found)


def test_samples_of_a_prompt_belong_together_in_any_order() -> None:
    table = validation(['{"acc": 1}', '{"acc": 0}', '{"acc": 1}', '{"acc": 1}', "{}", "{}"])
    assert validation_metrics(table.take([3, 0, 5, 2, 4, 1])) == pytest.approx(validation_metrics(table))


def test_sizes() -> None:
    assert [subset_sizes(n) for n in (2, 3, 4, 5, 16)] == [[2], [2, 3], [2, 4], [2, 4, 5], [2, 4, 8, 16]]


VALUES = np.array([[0.5, -1.0, 2.0, 0.5], [1.0, 0.0, 0.0, 0.0]])


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_best_over_every_draw(n: int) -> None:
    means, deviations = best_of(VALUES, n)
    for row, mean, deviation in zip(VALUES, means, deviations, strict=True):
        best = [max(draw) for draw in itertools.product(row, repeat=n)]
        assert mean == pytest.approx(np.mean(best))
        assert deviation == pytest.approx(np.std(best))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_majority_over_every_draw(n: int) -> None:
    """The bootstrap's mean is within four of its standard errors of the mean over all 5^n draws."""
    values, votes = np.array([1.0, 0.0, 0.0, 1.0, 0.25]), np.array(["7", "8", "8", "7", "9"], dtype=object)
    outcomes = []
    for draw in itertools.product(range(5), repeat=n):
        counts = Counter(votes[i] for i in draw)  # the first of equals comes first
        vote = max(counts, key=counts.__getitem__)
        outcomes.append(next(values[i] for i in draw if votes[i] == vote))
    mean, deviation = majority(values, votes, n)
    assert abs(mean - np.mean(outcomes)) < 4 * np.std(outcomes) / 1000**0.5
    assert deviation == pytest.approx(np.std(outcomes), rel=0.1)


@pytest.mark.parametrize("samples", [1, 2, 5, 6])
def test_pass_at_k_over_every_choice(samples: int) -> None:
    for k in range(1, samples + 1):
        for right in range(samples + 1):
            results = [1] * right + [0] * (samples - right)
            expected = np.mean([max(chosen) for chosen in itertools.combinations(results, k)])
            assert pass_at(np.array([right]), samples, k) == pytest.approx([expected])


def test_metrics_of_other_numbers_of_samples() -> None:
    source = "canary/sums/acc"
    for name in ("mean@1", "mean@4"):  # the one that a validation of so many samples logs
        assert wrong_samples(f"{source}/{name}", int(name[-1])) == ""
    assert wrong_samples(f"{source}/mean@1", 4) == "mean@4"
    assert wrong_samples(f"{source}/best@3/mean", 6) == "best@2 or best@4 or best@6"
    assert wrong_samples(f"{source}/pass@2", 1) == "mean@1"
    assert wrong_samples(f"{source}/std@2", 4) == "std@4"
