"""What a step is predicted to take: of what it really does, whatever is left out, drawn besides, or not done at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from qwen import write_qwen
from test_fit import CONFIG
from test_run_folder import Store

from megappo.cluster import dataflow
from megappo.cluster.calls import Place, Span
from megappo.cluster.dataflow import Batch, put_table
from megappo.cluster.rewards import RewardGroup
from megappo.config import Config, load_config
from megappo.layout.devices import PROFILES
from megappo.plan.estimate import Workload, estimate, full_workload
from megappo.plan.limits import call_problems
from megappo.plan.sync import rough_sync, weight_sync
from megappo.report.predicted import Prediction
from megappo.report.times import times
from megappo.trainer import Trainer

H200 = PROFILES["H200"]
Configure = Callable[..., Config]


@pytest.fixture
def configure(tmp_path: Path) -> Configure:
    write_qwen(tmp_path / "model")
    (tmp_path / "config.yaml").write_text(CONFIG.replace("MODEL", str(tmp_path / "model")))
    return lambda *overrides: load_config(tmp_path / "config.yaml", overrides)


def seconds(config: Config, tokens: np.ndarray, responses: np.ndarray, **more: Any) -> dict[str, float]:
    found = Prediction(config, "NVIDIA H200").metrics(tokens, responses, **more)
    return {name.removeprefix("perf/predicted_"): value for name, value in found.items()}


HALF = np.arange(512) % 2 == 0
RESPONSES = np.where(HALF, 100, 256)
"""Every other response came to its end; the others were cut."""


def test_responses_that_do_not_train_are_in_no_update(configure: Configure) -> None:
    """Four mini-batches of 128, of which half is left: four optimizer steps of 64 shorter rows."""
    config = configure()
    everything = seconds(config, RESPONSES + 128, RESPONSES)
    found = seconds(config, RESPONSES + 128, RESPONSES, trained=HALF)
    left = seconds(configure("ppo.mini_batch=64"), np.full(256, 228), np.full(256, 100))
    for role in ("actor", "critic"):
        assert found[f"s/update_{role}"] == pytest.approx(left[f"s/update_{role}"])
        assert found[f"s/update_{role}"] < 0.6 * everything[f"s/update_{role}"]
        assert found[f"memory_gb/{role}"] == pytest.approx(left[f"memory_gb/{role}"])
    for phase in ("gen", "old_log_prob", "values", "ref", "adv"):
        assert found[f"s/{phase}"] == everything[f"s/{phase}"]
    assert found["s/step"] < everything["s/step"]
    assert seconds(config, RESPONSES + 128, RESPONSES, trained=HALF | True) == everything


def test_what_was_not_done_is_not_predicted(configure: Configure) -> None:
    every = seconds(configure(), RESPONSES + 128, RESPONSES)
    done = {"gen", "old_log_prob", "values", "ref", "adv", "update_critic", "update_weights"}  # the critic warms up
    found = seconds(configure(), RESPONSES + 128, RESPONSES, done=done)
    assert {name.removeprefix("s/") for name in found if name.startswith("s/")} == {*done, "step"}
    assert "memory_gb/actor" not in found and found["memory_gb/critic"] == every["memory_gb/critic"]
    assert found["s/step"] == pytest.approx(sum(every[f"s/{name}"] for name in done))
    none = seconds(
        configure("roles.critic.offload=all"), RESPONSES + 128, RESPONSES, trained=HALF & ~HALF, done={"adv"}
    )
    assert none["s/step"] == none["s/adv"]


def test_what_is_drawn_besides_is_predicted(configure: Configure) -> None:
    """Rounds of dynamic sampling, greedy responses: each has its own longest response to wait for."""
    reward = "roles.reward={pool: all, model: MODEL}"
    config = configure(reward.replace("MODEL", configure().model))
    once = seconds(config, RESPONSES + 128, RESPONSES)
    found = seconds(config, RESPONSES + 128, RESPONSES, rounds=(512, 512, 512))
    for phase in ("gen", "reward_model"):
        assert found[f"s/{phase}"] == pytest.approx(3 * once[f"s/{phase}"])
    assert found["s/old_log_prob"] == once["s/old_log_prob"]
    half = seconds(config, RESPONSES + 128, RESPONSES, judged=0.5)["s/reward_model"]  # rules are enough for the others
    assert 0.5 * once["s/reward_model"] < half < 0.6 * once["s/reward_model"]
    assert seconds(config, RESPONSES + 128, RESPONSES, judged=0.0, done={"adv"})["s/step"] > 0


def test_a_plan_has_the_greedy_responses(configure: Configure) -> None:
    plain = configure("ppo.estimator=rloo", "roles.critic=null", "roles.rollout.samples_per_prompt=2")
    greedy = configure("ppo.estimator=remax", "roles.critic=null", "roles.rollout.samples_per_prompt=2")
    sync = rough_sync(plain, H200)
    few, more = (estimate(one, H200, full_workload(one), sync).phases["gen"].seconds for one in (plain, greedy))
    alone = estimate(plain, H200, Workload(512, 128, 256, 256), sync).phases["gen"].seconds
    assert more == pytest.approx(few + alone)
    # Each is a call of its own, with the whole of run.timeout_s.
    longest = max(phase.seconds for phase in estimate(plain, H200, full_workload(plain), sync).phases.values())
    limit = (f"run.timeout_s={2.1 * longest}", "data.validation=[]")
    late = configure(*limit, "ppo.estimator=remax", "roles.critic=null", "roles.rollout.samples_per_prompt=2")
    work = full_workload(late)
    assert list(call_problems(late, H200, work, estimate(late, H200, work, sync))) == []


def test_a_step_is_predicted_as_it_was(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a batch, a row takes one place less than it has tokens: the last one predicts nothing."""
    monkeypatch.setattr(dataflow, "ray", Store())
    reward = (
        f"roles.reward={{pool: all, model: {configure().model}, function: r, weights_by_source: {{b: {{model: 0}}}}}}"
    )
    config = configure("ppo.mask_truncated=true", reward)
    calls = (("rollout", "generate"), ("actor", "score"), ("actor", "update"), ("reward", "score"))
    spans = [Span(Place(role, 0, "all", "", ""), method, 0.0, 1.0) for role, method in calls]
    sources = put_table(pa.table({"id": np.arange(512), "data_source": ["a", "b", "b", "b"] * 128}))
    trains = np.where(HALF, RESPONSES, 0)
    batch = Batch(np.arange(512), RESPONSES + 127, RESPONSES, ((sources,),), loss_tokens=trains)
    nobody: Any = None
    trainer: Any = SimpleNamespace(
        config=config,
        cluster=SimpleNamespace(
            calls=SimpleNamespace(spans=spans),
            device_name="NVIDIA H200",
            reward=RewardGroup(nobody, nobody, config.roles.reward, ""),
        ),
        prediction=Prediction(config, "NVIDIA H200"),
    )
    found = Trainer.performance(trainer, batch, (512, 256), 4.0)
    wanted = Prediction(config, "NVIDIA H200").metrics(
        RESPONSES + 128,
        RESPONSES,
        trained=HALF,
        rounds=(512, 256),
        judged=0.25,
        done={"gen", "old_log_prob", "update_actor", "reward_model", "adv"},
    )
    assert {name: value for name, value in found.items() if name.startswith("perf/predicted")} == wanted
    whole = estimate(config, H200, Workload(512, 128, RESPONSES.mean(), 256), weight_sync(config, H200)[1])
    assert found["perf/predicted_s/old_log_prob"] == whole.phases["old_log_prob"].seconds


def test_the_report_counts_steps_without_a_phase() -> None:
    """As it does for what was measured: a mean over all steps."""
    steps = [{"timing_s/update_actor": 4.0, "perf/predicted_s/update_actor": 3.0}, {}]
    rows: Any = [
        {"step": n, "metrics": {"timing_s/step": 8.0, "perf/predicted_s/step": 7.0, **metrics}}
        for n, metrics in enumerate(steps, 1)
    ]
    assert "<td>2 s</td><td>1.5 s</td>" in times(rows)
