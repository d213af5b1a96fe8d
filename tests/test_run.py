"""A run through the command line, looked at from outside; and the same run killed twice, which must end the same."""

from __future__ import annotations

import math
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from small_run import Command, assert_logs_what_check_says, kill, log_steps, make_run_folder, worker_pid

from megappo.data import batch
from megappo.report.run_log import read_log, read_samples

pytestmark = pytest.mark.runs

STEPS = 5
ROWS = 21
TIMES = (
    *("timing_s/", "perf/busy_share", "perf/idle_share", "perf/driver_share", "perf/time_per_step", "perf/throughput"),
    *("perf/tflops", "perf/mfu"),
)
ROLLOUT_COLUMNS = {
    *("id", "prompt_index", "data_source", "prompt_ids", "response_ids", "rollout_logprobs", "finish_reason"),
    *("weight_version", "logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns", "score"),
}
VERL_METRICS = {
    *(f"actor/{name}" for name in ("pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "entropy", "grad_norm")),
    *("actor/lr", "actor/reward_kl_penalty", "actor/reward_kl_penalty_coeff"),
    *(f"critic/{name}" for name in ("vf_loss", "vf_clipfrac", "vpred_mean", "grad_norm", "lr", "vf_explained_var")),
    *(
        f"critic/{name}/{kind}"
        for name in ("score", "rewards", "advantages", "returns", "values")
        for kind in ("mean", "max", "min")
    ),
    *(f"{name}_length/{kind}" for name in ("prompt", "response") for kind in ("mean", "max", "min", "clip_ratio")),
    *(
        f"timing_s/{name}"
        for name in ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
    ),
    *("timing_s/update_weights", "timing_s/step"),
    *("perf/total_num_tokens", "perf/time_per_step", "perf/throughput", "training/global_step", "training/epoch"),
}


@dataclass(frozen=True)
class Outcome:
    folder: Path
    status: int
    console: str

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def metrics(self) -> dict[int, dict[str, float]]:
        return {row["step"]: row["metrics"] for row in read_log(self.run)}

    def rollouts(self, step: int) -> Any:
        return pq.read_table(self.run / "rollouts" / f"step_{step}.parquet")


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run_folder(tmp_path_factory.mktemp("fresh"))


@pytest.fixture(scope="module")
def whole(fresh: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole") / "work"
    shutil.copytree(fresh, folder)
    command = Command(folder)
    status = command.wait()
    command.assert_nothing_left()
    return Outcome(folder, status, command.text)


@dataclass(frozen=True)
class Killed:
    """The same run, killed after step 3 (its checkpoint is of step 2); then robbed of a worker in step 3, twice.

    The second time it may start over by itself.
    """

    steps_when_killed: list[int]
    worker_failure: Outcome
    seconds_to_end: float
    finished: Outcome


@pytest.fixture(scope="module")
def killed(fresh: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killed]:
    folder = tmp_path_factory.mktemp("killed") / "work"
    shutil.copytree(fresh, folder)

    first = Command(folder)
    first.until(lambda: 3 in log_steps(folder / "run"))
    kill(first.process.pid)  # nobody is left to clean up
    first.assert_nothing_left()
    steps = log_steps(folder / "run")
    # What a checkpoint that was being written would leave.
    half = folder / "run" / "checkpoints" / "step_9.partial" / "actor"
    half.mkdir(parents=True)
    (half / "metadata.json").write_text("{")

    second = Command(folder)
    second.until(lambda: "resumed" in second.text)
    victim = worker_pid(second.processes(), folder / "run" / "logs" / "value-rank1.log")
    kill(victim)
    began = time.monotonic()
    status = second.wait()
    seconds = time.monotonic() - began
    second.assert_nothing_left()
    failure = Outcome(folder, status, second.text)

    third = Command(folder, "run.restarts=1")
    third.until(lambda: "resumed" in third.text)
    kill(worker_pid(third.processes(), folder / "run" / "logs" / "train-rank2.log"))
    yield Killed(steps, failure, seconds, Outcome(folder, third.wait(), third.text))
    third.kill_all()


# --- what a run leaves -----------------------------------------------------------------------------------------------


def test_ends_well_and_says_how(whole: Outcome) -> None:
    assert whole.status == 0, whole.console
    assert "report: run/report.html" in whole.console
    for step in range(1, STEPS + 1):
        assert re.search(rf"step {step}/{STEPS} ", whole.console)


def test_the_console_is_quiet(whole: Outcome) -> None:
    lines = whole.console.splitlines()
    known = ("megappo: ", "  ", "[", "step ", "WARNING: ", "finished in ", "report: ")
    assert [line for line in lines if not line.startswith(known)] == []
    assert len(lines) < 40
    logs = {path.name for path in (whole.run / "logs").iterdir()}
    assert logs == {
        *(f"train-rank{rank}.log" for rank in range(4)),
        *("value-rank0.log", "value-rank1.log", "score-rank0.log", "rollout-engine0.log", "reward.log"),
    }
    assert "INFO" in (whole.run / "logs" / "rollout-engine0.log").read_text()  # vLLM's chatter went there


def test_log_has_each_step_once_with_verls_names(whole: Outcome) -> None:
    assert log_steps(whole.run) == list(range(STEPS + 1))
    for step in range(1, STEPS + 1):
        metrics = whole.metrics[step]
        assert VERL_METRICS - metrics.keys() == set()
        assert all(math.isfinite(value) for value in metrics.values()), metrics
        assert metrics["training/global_step"] == step
    assert {step for step, m in whole.metrics.items() if "val-core/arithmetic/reward/mean@1" in m} == {0, 3, 5}
    assert {step for step, m in whole.metrics.items() if "timing_s/save_checkpoint" in m} == {2, 4, 5}
    assert [whole.metrics[step]["training/epoch"] for step in (1, 5)] == [0, 1]  # 7 of 20 prompts a step


def test_rollouts_have_every_column_and_row(whole: Outcome) -> None:
    for step in range(1, STEPS + 1):
        rows = whole.rollouts(step)
        assert set(rows.column_names) >= ROLLOUT_COLUMNS
        assert rows.column("id").to_pylist() == list(range(ROWS))
        assert set(rows.column("weight_version").to_pylist()) == {step - 1}
        prompts = batch.column(rows, "prompt_index")
        assert [len(set(prompts[i : i + 3])) for i in range(0, ROWS, 3)] == [1] * 7
        lengths = batch.lengths(rows, "response_ids")
        for name in ("rollout_logprobs", "logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns"):
            assert (batch.lengths(rows, name) == lengths).all(), name
        for ids, reason in zip(batch.split_rows(rows, "response_ids"), rows.column("finish_reason"), strict=True):
            assert (reason.as_py() == "stop") == (ids[-1] == 1)
            assert (reason.as_py() == "length") == (len(ids) == 9 and ids[-1] != 1)
            assert (ids < 51).all()  # nothing from the vocabulary's padding


def test_a_reward_that_returns_nan_is_counted_and_shown_and_the_run_goes_on(whole: Outcome) -> None:
    failed = {}
    for step in range(1, STEPS + 1):
        rows = whole.rollouts(step)
        expected = [truth.endswith("7") for truth in rows.column("ground_truth").to_pylist()]
        assert rows.column("failed").to_pylist() == expected
        assert (batch.column(rows, "score")[np.array(expected)] == 0).all()
        failed[step] = sum(expected)
        assert whole.metrics[step]["reward/failed_rows"] == failed[step]
    assert sum(failed.values()) > 0
    count = next(count for count in failed.values() if count)
    assert f"WARNING: {count} of 21 rewards failed and count as 0: returned nan" in whole.console


def test_checkpoints_are_complete_and_the_last_two(whole: Outcome) -> None:
    assert sorted(path.name for path in (whole.run / "checkpoints").iterdir()) == ["step_4", "step_5"]
    for step in ("step_4", "step_5"):
        folder = whole.run / "checkpoints" / step
        assert {path.name for path in folder.iterdir()} == {"actor", "critic", "trainer.json"}
        assert list((folder / "actor").glob("*.distcp")) and list((folder / "critic").glob("*.distcp"))


def test_config_samples_tensorboard_and_report(whole: Outcome) -> None:
    assert yaml.safe_load((whole.run / "config.yaml").read_text())["ppo"]["mini_batch"] == 8
    kinds = {(sample["step"], sample["kind"]) for sample in read_samples(whole.run)}
    validated = {(step, kind) for step in (0, 3, 5) for kind in ("validation", "canary")}
    assert kinds == {*((step, "train") for step in range(1, 6)), *validated}
    (events,) = (whole.run / "tensorboard").iterdir()
    assert b"actor/pg_loss" in events.read_bytes()
    page = (whole.run / "report.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html") and "<svg" in page
    assert re.findall(r"""(?:src|href)\s*=\s*["']?(?!#|data:)[^\s>]+|@import|url\((?!#|data:)""", page) == []


# --- what must hold of the numbers -----------------------------------------------------------------------------------


def test_policies_agree_before_the_first_update(whole: Outcome) -> None:
    rows = whole.rollouts(1)
    actor, reference, engine = (batch.flat(rows, name) for name in ("logprobs", "ref_logprobs", "rollout_logprobs"))
    assert np.abs(actor - reference).max() <= 1e-5  # TP2 x PP2 with sequence parallelism, and one rank
    assert np.abs(actor - engine).mean() <= 1e-5
    assert abs(whole.metrics[1]["actor/reward_kl_penalty"]) <= 1e-6
    later = whole.rollouts(3)  # weights that came over the wire, and a reference that stays
    assert np.abs(batch.flat(later, "logprobs") - batch.flat(later, "rollout_logprobs")).mean() <= 1e-5
    assert np.abs(batch.flat(later, "logprobs") - batch.flat(later, "ref_logprobs")).mean() > 1e-2


def test_the_first_update_of_a_step_starts_at_ratio_one(whole: Outcome) -> None:
    for step in range(1, STEPS + 1):
        assert abs(whole.metrics[step]["actor/ppo_kl_first"]) <= 1e-6


def test_rewards_are_score_and_penalty(whole: Outcome) -> None:
    for step in (1, 3):
        rows, coef = whole.rollouts(step), whole.metrics[step]["actor/reward_kl_penalty_coeff"]
        kl = [
            a - b
            for a, b in zip(batch.split_rows(rows, "logprobs"), batch.split_rows(rows, "ref_logprobs"), strict=True)
        ]
        for reward, penalty, score in zip(
            batch.split_rows(rows, "rewards"), kl, batch.column(rows, "score"), strict=True
        ):
            expected = -coef * penalty
            expected[-1] += score
            np.testing.assert_allclose(reward, expected, atol=1e-6)


def test_guards_acted(whole: Outcome) -> None:
    """One lowers rates after three steps, another raises the KL coefficient after four; both are in `killed` too."""
    factors = [whole.metrics[step]["guard/rate_factor"] for step in range(1, 6)]
    assert factors == [1, 1, 0.5, 0.5, 0.5]
    assert [whole.metrics[step]["guard/kl_factor"] for step in range(1, 6)] == [1, 1, 1, 2, 2]
    assert [whole.metrics[step]["guard/long"] for step in range(1, 6)] == [1, 2, 0, 1, 2]
    rates = [whole.metrics[step]["actor/lr"] for step in range(1, 6)]
    np.testing.assert_allclose(rates, [0.5e-3, 1e-3, 1e-3, 1e-3 * 2 / 3 / 2, 1e-3 / 3 / 2])
    assert "WARNING: ppo.guards.long: response_length/mean is " in whole.console


def test_guards_may_watch_what_is_logged_and_nothing_else(whole: Outcome) -> None:
    assert_logs_what_check_says(whole.run)
    assert {step for step, m in whole.metrics.items() if "canary/arithmetic/reward/mean@1" in m} == {0, 3, 5}


def test_schedules_and_controller_moved(whole: Outcome) -> None:
    rates = [whole.metrics[step]["actor/lr"] for step in range(1, 6)]
    assert rates[0] < rates[1] and rates[-1] < rates[2]
    coefs = [whole.metrics[step]["actor/reward_kl_penalty_coeff"] for step in range(1, 6)]
    assert coefs[0] == 0.05 and len(set(coefs)) == 5


# --- killed and resumed ----------------------------------------------------------------------------------------------


def test_killed_between_two_checkpoints(killed: Killed) -> None:
    assert killed.steps_when_killed[:4] == [0, 1, 2, 3]


def test_a_worker_that_dies_ends_the_command_with_its_name(killed: Killed) -> None:
    failure = killed.worker_failure
    assert failure.status == 1
    assert killed.seconds_to_end < 15  # run.timeout_s is 300: a death is heard of at once
    message = failure.console[failure.console.index("error: ") :]
    assert re.search(r"error: critic rank 1 \(pool value, node [\d.]+\) died in \w+ ", message), message
    assert "value-rank1.log" in message
    assert "Traceback" not in failure.console


def test_with_restarts_it_starts_over_by_itself(killed: Killed) -> None:
    assert killed.finished.status == 0, killed.finished.console
    lines = killed.finished.console
    assert re.search(r"WARNING: actor rank 2 \(pool train, node [\d.]+\) died in \w+ ", lines), lines
    assert "starting over from the checkpoint step_2 (restart 1 of run.restarts = 1)" in lines
    assert lines.count("resumed from the checkpoint of step 2") == 2


def test_resumed_run_equals_the_uninterrupted_one(whole: Outcome, killed: Killed) -> None:
    resumed = killed.finished
    assert resumed.status == 0, resumed.console
    assert "resumed from the checkpoint of step 2" in resumed.console
    assert log_steps(resumed.run) == list(range(STEPS + 1))
    for step, expected in whole.metrics.items():
        found = resumed.metrics[step]
        assert {n: v for n, v in found.items() if not n.startswith(TIMES)} == {
            n: v for n, v in expected.items() if not n.startswith(TIMES)
        }, step
        assert found.keys() == expected.keys()
    for step in range(1, STEPS + 1):
        assert resumed.rollouts(step).equals(whole.rollouts(step)), step
    strip = [{**sample} for sample in read_samples(whole.run)]
    assert read_samples(resumed.run) == strip
    assert sorted(path.name for path in (resumed.run / "checkpoints").iterdir()) == ["step_4", "step_5"]


def test_a_finished_run_says_so_and_starts_nothing(killed: Killed, whole: Outcome) -> None:
    before = (whole.run / "log.jsonl").read_bytes()
    again = Command(whole.folder)
    assert again.wait() == 0
    assert "5 steps are done" in again.text and "report: run/report.html" in again.text
    assert "starting" not in again.text
    assert (whole.run / "log.jsonl").read_bytes() == before
