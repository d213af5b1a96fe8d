"""What scoring and training on given responses need, for Qwen2.5-0.5B; the figures are those of `test_fit`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from qwen import write_qwen
from test_fit import ACTIVATIONS, CONFIG, STATE, WEIGHTS, device

from megappo.check.findings import Advice
from megappo.check.memory import fit_findings, scoring_fit_findings, training_fit_findings
from megappo.config import load_config, load_supervised
from megappo.fit.devices import DeviceTooSmall
from megappo.fit.given import check_scoring_fit, check_training_fit
from megappo.layout.memory import GIB

COMMON = 0.6 + 0.09  # one context, workspaces
GIVEN = """\
run: {dir: run, steps: 1, device: cuda, device_profile: PROFILE}
model: MODEL
data: {train: pairs.parquet, batch: 512, max_tokens: 384}
pools: {train: {devices_per_node: 1}}
role: {pool: train}
lr: 1.0e-5
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_qwen(tmp_path / "model")
    return tmp_path / "model"


def need_of(problem: str) -> float:
    """GiB that a turn takes, as a person is told."""
    return float(problem.split(" needs ")[1].split(" GiB")[0])


def training(model: Path, name: str, *overrides: str, total: float = 4) -> str:
    path = model.parent / "config.yaml"
    path.write_text(GIVEN.replace("MODEL", str(model)).replace("PROFILE", "H100"))
    config = load_supervised(path, overrides)
    with pytest.raises(DeviceTooSmall) as failure:
        check_training_fit(config, name, [device(total)] * config.pools["train"].devices)
    (problem,) = failure.value.problems
    return problem


def test_training_on_responses_and_on_pairs(model: Path) -> None:
    fixed = WEIGHTS + STATE + COMMON
    head = (3 * 16384 * 896 * 2 + 2 * 883 * 151936 * 2 + 896 * 151936 * 2) / GIB
    assert need_of(training(model, "actor")) == pytest.approx(fixed + ACTIVATIONS + head, abs=0.06)
    in_mlp = 16384 * 2 * (2 * 896 + 2 * 4864) / GIB
    assert need_of(training(model, "reward")) == pytest.approx(fixed + ACTIVATIONS + in_mlp, abs=0.06)
    # Two pairs of 384 tokens a side fill a tenth of a micro-batch.
    few = 4 * 384 / 16384
    assert need_of(training(model, "reward", "data.batch=2")) == pytest.approx(
        fixed + few * (ACTIVATIONS + in_mlp), abs=0.06
    )
    adapters = training(model, "reward", "role.lora={rank: 8, alpha: 16}", "data.batch=2", total=1)
    assert need_of(adapters) < fixed - 0.8 * STATE + few * (ACTIVATIONS + in_mlp)


def test_the_ways_out_of_training(model: Path) -> None:
    lines = training(model, "actor").splitlines()
    assert lines[0].startswith("pools.train: updating the actor needs ") and "on device 0 (NVIDIA Example)" in lines[0]
    ways = "role.recompute=selective or full; role.micro_batch_tokens below 16384 (at least 384); more tp or pp"
    assert lines[-1] == f"  ways out: {ways}, or more devices in the pool"
    check_training_fit(load_supervised(model.parent / "config.yaml", ["role.recompute=full"]), "actor", [device(24)])


def test_validation_may_take_more_than_an_update(model: Path) -> None:
    few = ("data.batch=2", "role.recompute=full", "data.validation=[held_out.parquet]")
    problem = training(model, "actor", *few)
    head = (2 * 16384 * 896 * 2 + 2 * 883 * 151936 * 2) / GIB
    layer = 16384 * 2 * (896 + 3 * 4864) / GIB
    assert problem.startswith("pools.train: validating the actor needs ")
    assert need_of(problem) == pytest.approx(WEIGHTS + STATE + COMMON + max(head, layer), abs=0.06)
    ways = "role.micro_batch_tokens below 16384 (at least 384); more tp or pp, or more devices in the pool"
    assert problem.splitlines()[-1] == f"  ways out: {ways}"
    assert training(model, "actor", *few[:2]).startswith("pools.train: updating the actor needs ")


def test_what_training_leaves_on_a_node(model: Path) -> None:
    """Weights and optimizer of what trains, if it is asked to give them up, and always a copy while they are saved; no
    gradients, which are not kept."""
    path = model.parent / "config.yaml"
    path.write_text(GIVEN.replace("MODEL", str(model)).replace("PROFILE", "ours.yaml"))
    optimizer = STATE * 3 / 4
    saved = optimizer * 14 / 12

    def check(host: float, *overrides: str) -> None:
        config = load_supervised(path, overrides)
        nodes = [replace(device(40), node="node 10.0.0.7", node_memory=int(host * GIB))]
        check_training_fit(config, "actor", nodes * config.pools["train"].devices)

    check(saved + 0.01)
    check(0, "role.offload=all")  # not known
    check(WEIGHTS + optimizer + saved + 0.01, "role.offload=all")
    check(optimizer + saved + 0.01, "role.offload=optimizer")
    check(2 * WEIGHTS + optimizer + saved + 0.02, "role.offload=all", "pools.train.devices_per_node=2")
    with pytest.raises(DeviceTooSmall) as failure:
        check(4, "role.offload=all")
    assert failure.value.problems == (
        f"host memory: node 10.0.0.7 has 4.0 GiB, and {WEIGHTS + optimizer + saved:.1f} GiB are to be there at a time: "
        f"actor {WEIGHTS + optimizer:.1f}, checkpoints as they are written {saved:.1f}; ways out: role.offload=none; "
        "more devices in the pool, on more nodes; nodes with more memory",
    )


def test_check_knows_the_nodes_memory_of_a_profile(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model.parent)
    numbers = "memory_gib: 140, matrix_tflops: 700, memory_gb_s: 4000, host_gb_s: 50, node_gb_s: 300, network_gb_s: 40"
    Path("ours.yaml").write_text(f"{{{numbers}, host_memory_gib: 15}}")
    Path("config.yaml").write_text(GIVEN.replace("MODEL", str(model)).replace("PROFILE", "ours.yaml"))
    nodes = ("pools.train={nodes: 2, devices_per_node: 2}", "role.offload=all")
    assert not list(training_fit_findings(load_supervised("config.yaml", nodes), "actor"))
    one = ("pools.train={devices_per_node: 4}", "role.offload=all")
    (advice,) = training_fit_findings(load_supervised("config.yaml", one), "actor")
    assert isinstance(advice, Advice) and advice.startswith("host memory: node 0 has 15.0 GiB, and 15.6 GiB are to be ")


def test_scoring(model: Path) -> None:
    path = model.parent / "config.yaml"
    path.write_text(CONFIG.replace("MODEL", str(model)))

    def check(total: float, *overrides: str) -> None:
        config = load_config(path, overrides)
        roles = {name: config.roles.megatron[name] for name in ("actor", "reference")}
        check_scoring_fit(config, roles, {"all": [device(total)]})

    head = (2 * 16384 * 896 * 2 + 2 * 883 * 151936 * 2) / GIB
    with pytest.raises(DeviceTooSmall) as failure:
        check(2)
    (problem,) = failure.value.problems
    layer = 16384 * 2 * (896 + 3 * 4864) / GIB
    assert need_of(problem) == pytest.approx(2 * WEIGHTS + COMMON + max(head, layer), abs=0.06)
    assert "critic" not in problem and "optimizer" not in problem
    assert problem.splitlines()[-1] == (
        "  ways out: roles.actor.micro_batch_tokens below 16384; roles.reference.offload=all; more tp or pp, or more "
        "devices in the pool"
    )
    check(need_of(problem) + 0.06)
    check(need_of(problem) - WEIGHTS + 0.1, "roles.reference.offload=all", "roles.actor.offload=all")


def test_what_scoring_roles_leave_on_a_node(model: Path) -> None:
    """Weights of roles that take turns wait in its memory; nothing else, as nothing trains."""
    path = model.parent / "config.yaml"
    path.write_text(CONFIG.replace("MODEL", str(model)))
    ample = device(40)

    def check(host: float, *overrides: str) -> None:
        config = load_config(path, overrides)
        roles = {name: config.roles.megatron[name] for name in ("actor", "reference")}
        check_scoring_fit(config, roles, {"all": [replace(ample, node="node 10.0.0.7", node_memory=int(host * GIB))]})

    both = ("roles.reference.offload=all", "roles.actor.offload=all")
    check(2 * WEIGHTS + 0.01, *both)
    check(0, *both)  # not known
    check(0.1, "roles.reference.offload=optimizer")  # which it has not
    with pytest.raises(DeviceTooSmall) as failure:
        check(1.5 * WEIGHTS, *both)
    assert failure.value.problems == (
        f"host memory: node 10.0.0.7 has {1.5 * WEIGHTS:.1f} GiB, and {2 * WEIGHTS:.1f} GiB are to be "
        f"there at a time: actor {WEIGHTS:.1f}, reference {WEIGHTS:.1f}; ways out: roles.actor.offload=none; "
        "roles.reference.offload=none; more tp or pp, which leave fewer copies of the weights; nodes with more memory",
    )


def test_check_says_so_before_the_job_queues(model: Path) -> None:
    path = model.parent / "config.yaml"
    path.write_text(GIVEN.replace("MODEL", str(model)).replace("PROFILE", "H100"))
    assert not list(training_fit_findings(load_supervised(path), "actor"))
    write_qwen(model, "7B")
    (advice,) = training_fit_findings(load_supervised(path), "actor")
    assert isinstance(advice, Advice) and advice.startswith("pools.train: updating the actor needs ")
    assert advice.endswith("(planned for run.device_profile: H100)")
    assert not list(training_fit_findings(load_supervised(path, ["run.device=cpu"]), "actor"))


def test_check_says_of_scoring_what_scoring_needs(model: Path) -> None:
    """Not what training would: no optimizer, no engine."""
    path = model.parent / "config.yaml"
    path.write_text(CONFIG.replace("MODEL", str(model)))
    write_qwen(model, "7B")
    config = load_config(path, ["run.device_profile=H100"])
    assert list(fit_findings(config))
    assert not list(scoring_fit_findings(config))
    (advice,) = scoring_fit_findings(
        load_config(path, ["run.device_profile=H100", "roles.actor.micro_batch_tokens=4000000"])
    )
    assert isinstance(advice, Advice) and advice.startswith("pools.all: scoring by the actor needs ")
