"""What is predicted, against the limits on time and host memory that a run, a job and nodes have."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from qwen import write_qwen
from small_project import make_project
from small_run import ROOT

from megappo.check.findings import Advice
from megappo.check.memory import fit_findings
from megappo.config import load_config
from megappo.fit.devices import Device, DeviceTooSmall
from megappo.fit.host import ASLEEP, MERGED, SAVED, check_nodes, host_bytes, waiting
from megappo.host_memory import host_memory
from megappo.launch import slurm
from megappo.layout.devices import PROFILES
from megappo.layout.memory import GIB
from megappo.plan import limits
from megappo.plan.command import Options, plan
from megappo.plan.estimate import estimate, full_workload
from megappo.plan.limits import round_up
from megappo.plan.memory import fit_problems
from megappo.plan.sync import rough_sync

PRESET = ROOT / "configs" / "qwen2.5_72b_128gpu.yaml"
LONG = (
    *("data.max_response=16384", "roles.reference.micro_batch_tokens=17408"),
    *("roles.actor.micro_batch_tokens=17408", "roles.actor.recompute=full"),
    *("roles.critic.micro_batch_tokens=17408", "roles.critic.recompute=full"),
)
SHARED = """\
run: {dir: run, steps: 1}
model: 7B
data: {train: train.parquet, prompts_per_step: 64, max_prompt: 128, max_response: 128}
pools: {all: {devices_per_node: 8}}
roles:
  actor: {pool: all, tp: 4, offload: all}
  critic: {pool: all, tp: 2, pp: 2, offload: all}
  reference: {pool: all, offload: all}
  rollout: {pool: all, sleep: offload, memory_fraction: 0.8}
  reward: {function: megappo.rewards.arithmetic}
ppo: {mini_batch: 64, actor_lr: 1.0e-6, critic_lr: 1.0e-5}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_qwen(tmp_path / "models" / "Qwen2.5-72B-Instruct", "72B")
    for size in ("7B", "32B"):
        write_qwen(tmp_path / size, size)
    (tmp_path / "shared.yaml").write_text(SHARED)
    return tmp_path


# --- time -------------------------------------------------------------------------------------------------------------


def test_round_numbers_of_seconds() -> None:
    assert [round_up(seconds) for seconds in (6868, 7000, 7001, 1.2, 10.1, 999)] == [7000, 7000, 7500, 2, 15, 1000]


def test_a_phase_that_would_be_taken_for_a_hang(folder: Path) -> None:
    """2,048 responses of 16,384 tokens in four engines: most of an hour, in one call."""
    (late,) = fit_findings(load_config(PRESET, LONG))
    words = r"run\.timeout_s: 2500 s is less than twice the 3[45]\d\d s predicted for generate: give 7000 \(planned for"
    assert re.match(words, late) and isinstance(late, Advice)
    assert list(fit_findings(load_config(PRESET, [*LONG, "run.timeout_s=7000"]))) == []
    lines: list[str] = []
    plan(load_config(PRESET, LONG), Options("H100"), lines.append)
    assert "\nwarning: run.timeout_s: 2500 s is less than twice the 3" in "\n" + lines[-1]


def test_a_checkpoint_that_would_be_taken_for_a_hang(folder: Path) -> None:
    """Of 72.7e9 weights and nearly as many of the critic, in 14 bytes each, at 2 GB/s."""
    (late,) = fit_findings(load_config(PRESET, ["run.timeout_s=1800"]))
    assert " 1800 s is less than twice the 1018 s predicted for write a checkpoint of 2,036 GB at 2 GB/s: give " in late
    assert list(fit_findings(load_config(PRESET))) == []


def test_a_validation_that_would_be_taken_for_a_hang(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's 2,048 responses are as many as the engines draw at once; ten times as many take ten times as long."""
    monkeypatch.setattr(limits, "WRITE_RATE", 1e15)
    prompts = pa.table({"data_source": ["a"], "prompt": ["p"], "reward_model": [{"ground_truth": "1"}]})
    pq.write_table(prompts.take([0] * 20_480), "test.parquet")
    step = ["data.prompts_per_step=2048", "ppo.mini_batch=2048", "run.device_profile=H100"]
    config, device = load_config("shared.yaml", step), PROFILES["H100"]
    phases = estimate(config, device, full_workload(config), rough_sync(config, device)).phases
    validating = [*step, "data.validation=[test.parquet]"]
    enough = f"run.timeout_s={2 * max(phase.seconds for phase in phases.values()) + 1}"
    assert list(fit_findings(load_config("shared.yaml", [*step, enough]))) == []
    (late,) = fit_findings(load_config("shared.yaml", [*validating, enough]))
    seconds = 10 * phases["gen"].seconds
    assert f" less than twice the {seconds:.0f} s predicted for generate, 20,480 prompts to validate on: give " in late
    for less in (f"run.timeout_s={2 * seconds + 1}", "data.validation_prompts=2048"):
        assert list(fit_findings(load_config("shared.yaml", [*validating, enough, less]))) == []


def test_a_step_and_a_checkpoint_come_before_the_end_of_a_job(folder: Path) -> None:
    config = load_config(PRESET)
    # 72.7e9 weights and nearly as many of the critic, 14 bytes each, at 2 GB/s; the step is what plan says of it.
    (line,) = slurm.warnings(config, slurm.SlurmOptions(), 1, 128)  # of one node, whose own disk will do
    found = re.match(
        r"--checkpoint-before: 900 s is less than the (\d+) s predicted for a step and (\d+) s for a", line
    )
    step = estimate(config, PROFILES["H100"], full_workload(config), rough_sync(config, PROFILES["H100"]))
    assert found and int(found[1]) == round(step.seconds) and int(found[2]) == pytest.approx(72.7 * 14, rel=0.01)
    assert list(slurm.warnings(config, slurm.SlurmOptions(checkpoint_before_s=2000), 1, 128)) == []


def test_restarts_without_checkpoints_begin_at_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    project = make_project(tmp_path)
    (line,) = project.report("run.restarts=3", "run.save_every=0").warnings
    assert line.startswith("run.save_every: 0 writes no checkpoint before the last step, so that each of the run.rest")
    assert project.report("run.restarts=3").warnings == project.report().warnings == ()
    found = list(slurm.warnings(load_config("config.yaml", ["run.save_every=0"]), slurm.SlurmOptions(), 1, 8))
    assert [line.split(":")[0] for line in found] == ["run.save_every"]
    assert list(slurm.warnings(load_config("config.yaml"), slurm.SlurmOptions(), 1, 8)) == []


# --- host memory ------------------------------------------------------------------------------------------------------

WEIGHTS = 7_615_616_512
"""Of Qwen2.5-7B, by its card 7.62e9; a critic has one row of a head, and no table, instead of 152,064."""
VALUES = WEIGHTS - 152_064 * 3584 + 3584


def test_what_waits_on_a_node(folder: Path) -> None:
    """By hand: weights once for each replica, in 2 bytes; an optimizer once, in 12; engines of one device each."""
    config = load_config("shared.yaml")
    uses = waiting(config, "all")
    total = {who: sum(one[who] for one in uses) for who in uses[0]}
    assert total["actor"] == pytest.approx((2 * 2 + 12) * WEIGHTS, rel=1e-3)
    assert total["critic"] == pytest.approx((2 * 2 + 12) * VALUES, rel=1e-3)
    assert total["reference"] == pytest.approx(8 * 2 * WEIGHTS, rel=1e-3)
    assert total[ASLEEP] == pytest.approx(8 * 2 * WEIGHTS, rel=1e-3)
    assert total[SAVED] == pytest.approx(14 * WEIGHTS, rel=1e-3)  # of the critic it is no more, and comes later
    assert host_bytes(config) == {"all": sum(total.values())}
    less = load_config("shared.yaml", ["roles.actor.offload=optimizer", "roles.critic.offload=none"])
    total = {who: sum(one[who] for one in waiting(less, "all")) for who in waiting(less, "all")[0]}
    assert total["actor"] == pytest.approx(12 * WEIGHTS, rel=1e-3) and "critic" not in total
    adapted = load_config(
        "shared.yaml", ["roles.rollout.sleep=drop", "roles.actor.lora={rank: 8}", "roles.reference=null"]
    )
    assert waiting(adapted, "all")[0].keys() == {"actor", "critic", MERGED, SAVED}


def test_the_stages_between_are_counted(folder: Path) -> None:
    """64 layers on 12 stages: 2, then ten times 6, then 2."""
    overrides = ["model=32B", "pools={all: {nodes: 12, devices_per_node: 8}}", "roles.rollout.sleep=drop"]
    overrides += ["roles.actor={pool: all, tp: 8, pp: 12, offload: all}"]
    overrides += [f"roles.{name}={{pool: all, tp: 8, pp: 12}}" for name in ("critic", "reference")]
    layer = 5120 * (2 * 5120 + 2 * 1024 + 3 * 27648)
    found = host_bytes(load_config("shared.yaml", overrides))["all"]
    assert found == pytest.approx(2 * 14 * 6 * layer, rel=1e-3)  # while it waits, and a copy of it to be saved


def devices(gib: float, nodes: tuple[str, ...] = ("node 10.0.0.7",) * 8) -> dict[str, list[Device]]:
    return {"all": [Device("NVIDIA Example", 80 * GIB, 79 * GIB, node, int(gib * GIB)) for node in nodes]}


def test_a_node_with_too_little_memory_is_named(folder: Path) -> None:
    config = load_config("shared.yaml")
    need = host_bytes(config)["all"] / GIB
    check_nodes(config, devices(need + 0.1))
    check_nodes(config, devices(0))  # not known
    with pytest.raises(DeviceTooSmall) as failure:
        check_nodes(config, devices(128))
    (problem,) = failure.value.problems
    assert problem.startswith(f"host memory: node 10.0.0.7 has 128.0 GiB, and {need:.1f} GiB are to be there at a time")
    assert "actor 11" in problem and f"{ASLEEP} 11" in problem
    assert "ways out: roles.actor.offload=optimizer or none; " in problem and "roles.rollout.sleep=drop; " in problem
    check_nodes(config, devices(need / 2 + 1, ("a", "b") * 4))  # pools may share nodes, and nodes have what is theirs


def test_a_profile_with_the_nodes_memory(folder: Path) -> None:
    config = load_config("shared.yaml")
    need = host_bytes(config)["all"] / GIB
    for gib, lines in ((None, 0), (need + 1, 0), (need - 1, 1)):
        device = replace(PROFILES["H200"], host_memory_gib=gib)
        assert len(fit_problems(config, device)) == lines
    shown: list[str] = []
    (folder / "ours.yaml").write_text(
        "{memory_gib: 140, matrix_tflops: 700, memory_gb_s: 4000, host_gb_s: 50, node_gb_s: 300, network_gb_s: 40, "
        f"host_memory_gib: {need - 1}}}"
    )
    with pytest.raises(ValueError, match="host memory: node 0 has"):
        plan(config, Options("ours.yaml"), shown.append)
    assert f"{need:.1f} GiB on each node of all, which has {need - 1:.1f}" in shown[1]


@pytest.mark.parametrize(
    ("lines", "files", "limit"),
    [
        ("0::/job/step\n", {"job/memory.max": "12345678", "job/step/memory.max": "max"}, 12345678),
        ("0::/\n", {"memory.max": "2345678"}, 2345678),
        ("4:cpu,memory:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": "345678"}, 345678),
        ("0::/job\n", {}, None),
        ("", {}, None),
    ],
)
def test_what_a_control_group_leaves(tmp_path: Path, lines: str, files: dict[str, str], limit: int | None) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(lines)
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = host_memory(tmp_path)
    assert found == limit if limit else found > 2**28
