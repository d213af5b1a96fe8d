"""Operations a second, from counts and times worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from megappo.report.speed import Worker, speed_metrics

SHAPE = SimpleNamespace(
    num_layers=1, hidden_size=2, num_heads=1, num_kv_heads=1, head_dim=2, ffn_hidden_size=3, vocab_size=10
)


def test_forward_and_training() -> None:
    # One token of weights: 2 * hidden * (2 q + 2 kv + 3 ffn) = 2 * 2 * (4 + 4 + 9) = 68; attention 2 * q * length^2.
    body = 68 * 5 + 2 * 2 * (9 + 4)
    head = 2 * 2 * 10 * 3
    found = speed_metrics(
        {"actor": Worker(SHAPE, devices=2), "critic": Worker(SHAPE, devices=1, scalar_head=True)},
        {"timing_s/old_log_prob": 2.0, "timing_s/update_actor": 4.0, "timing_s/values": 1.0, "timing_s/gen": 1.0},
        np.array([3, 2]),
        np.array([2, 1]),
        trained=np.array([True, True]),
        passes=lambda role: 2,
        peak_tflops=1e-9,
    )
    assert found["perf/tflops/old_log_prob"] == pytest.approx((body + head) / 2 / 2 / 1e12)
    assert found["perf/tflops/update_actor"] == pytest.approx(6 * (body + head) / 4 / 2 / 1e12)
    assert found["perf/tflops/values"] == pytest.approx(body / 1e12)
    assert found["perf/mfu/values"] == pytest.approx(body / 1e12 / 1e-9)
    frozen = speed_metrics(
        {"actor": Worker(SHAPE, devices=2, frozen=True)},
        {"timing_s/update_actor": 4.0},
        np.array([3, 2]),
        np.array([2, 1]),
        trained=np.array([True, True]),
        passes=lambda role: 2,
        peak_tflops=None,
    )
    assert frozen == {"perf/tflops/update_actor": pytest.approx(4 * (body + head) / 4 / 2 / 1e12)}
    assert "perf/tflops/gen" not in found and "perf/tflops/ref" not in found


def test_responses_that_are_not_in_the_batch_count_where_they_cost_time() -> None:
    def speed(**shares: float) -> dict[str, float]:
        return speed_metrics(
            {"rollout": Worker(SHAPE, devices=1), "actor": Worker(SHAPE, devices=1)},
            {"timing_s/gen": 1.0, "timing_s/old_log_prob": 1.0},
            np.array([3, 2]),
            np.array([2, 1]),
            trained=np.array([True, True]),
            passes=lambda role: 1,
            peak_tflops=None,
            shares=shares,
        )

    plain, more = speed(), speed(gen=2.5)
    assert more["perf/tflops/gen"] == pytest.approx(2.5 * plain["perf/tflops/gen"])
    assert more["perf/tflops/old_log_prob"] == plain["perf/tflops/old_log_prob"]


def test_rows_that_do_not_train_are_in_no_update() -> None:
    found = speed_metrics(
        {"actor": Worker(SHAPE, devices=1)},
        {"timing_s/old_log_prob": 1.0, "timing_s/update_actor": 1.0},
        np.array([3, 2]),
        np.array([2, 1]),
        trained=np.array([False, True]),
        passes=lambda role: 1,
        peak_tflops=None,
    )
    body, head = 68 * 2 + 2 * 2 * 4, 2 * 2 * 10
    assert found["perf/tflops/update_actor"] == pytest.approx(3 * (body + head) / 1e12)
    assert found["perf/tflops/old_log_prob"] == pytest.approx((body + 68 * 3 + 2 * 2 * 9 + 3 * head) / 1e12)
