"""What pools need against devices of given sizes, for Qwen2.5-0.5B on one shared device and on pools of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from qwen import write_qwen

from megappo.config import Config, load_config
from megappo.fit.devices import Device, DeviceTooSmall, Turn, check_fit, pool_turns
from megappo.layout.memory import GIB

CONFIG = """\
run: {dir: run, steps: 1, device: cuda}
model: MODEL
data: {train: train.parquet, prompts_per_step: 512, max_prompt: 128, max_response: 256}
pools: {all: {devices_per_node: 1}}
roles:
  actor: {pool: all}
  critic: {pool: all}
  reference: {pool: all}
  rollout: {pool: all, max_sequences: 512, memory_fraction: 0.5}
  reward: {function: megappo.rewards.arithmetic}
ppo: {mini_batch: 128, actor_lr: 1.0e-6, critic_lr: 1.0e-5}
"""

WEIGHTS = 0.92  # GiB: 494,032,768 parameters in bfloat16
STATE = 7.36  # gradients and optimizer: 16 bytes each
ACTIVATIONS = 14.86  # 16,384 tokens, 24 layers, 40,512 bytes each, and the last norm's
COMMON = 1.2 + 0.09  # two contexts, workspaces

Configure = Callable[..., Config]


@pytest.fixture
def configure(tmp_path: Path) -> Configure:
    write_qwen(tmp_path / "model")
    (tmp_path / "config.yaml").write_text(CONFIG.replace("MODEL", str(tmp_path / "model")))
    return lambda *overrides: load_config(tmp_path / "config.yaml", overrides)


def device(total: float, free: float | None = None) -> Device:
    return Device("NVIDIA Example", int(total * GIB), int((total - 0.6 if free is None else free) * GIB))


def needs(turns: Sequence[Turn]) -> dict[str, float]:
    return {turn.doing: turn.need / GIB for turn in turns}


def problems(config: Config, devices: Mapping[str, Sequence[Device]]) -> tuple[str, ...]:
    with pytest.raises(DeviceTooSmall) as failure:
        check_fit(config, devices)
    return failure.value.problems


def test_the_turns_of_a_shared_pool(configure: Configure) -> None:
    found = needs(list(pool_turns(configure(), "all", 0, 80 * GIB)))
    resting = 2 * (WEIGHTS + STATE) + WEIGHTS + COMMON
    assert list(found) == [
        *("scoring by the actor", "updating the actor", "scoring by the critic", "updating the critic"),
        *("scoring by the reference", "generating", "giving the engine the actor's weights"),
    ]
    head = (3 * 16384 * 896 * 2 + 2 * 883 * 151936 * 2 + 896 * 151936 * 2) / GIB
    in_mlp = 16384 * 2 * (2 * 896 + 2 * 4864) / GIB
    assert found["updating the actor"] == pytest.approx(resting + ACTIVATIONS + head, abs=0.03)
    assert found["updating the critic"] == pytest.approx(resting + ACTIVATIONS + in_mlp, abs=0.03)
    # Torch keeps the memory of an update for the next one.
    assert found["generating"] == pytest.approx(found["updating the actor"] + 40)
    giving = found["giving the engine the actor's weights"]
    assert giving == pytest.approx(found["updating the actor"] + WEIGHTS, abs=0.03)


def test_what_rests_on_the_host_does_not_count(configure: Configure) -> None:
    offload = ("roles.actor.offload=all", "roles.critic.offload=optimizer", "roles.reference.offload=all")
    found = needs(list(pool_turns(configure(*offload), "all", 0, 80 * GIB)))
    everything = needs(list(pool_turns(configure(), "all", 0, 80 * GIB)))
    # Who offloads gives torch's cache back too.
    assert found["generating"] == pytest.approx(40 + COMMON + WEIGHTS, abs=0.03)
    # A role has its own while it works: the optimizer's state in an update, weights alone to score.
    saved = {turn: everything[turn] - found[turn] for turn in found}
    assert saved["updating the actor"] == pytest.approx(STATE + WEIGHTS, abs=0.03)
    assert saved["updating the critic"] == pytest.approx(STATE + 2 * WEIGHTS, abs=0.03)
    assert saved["scoring by the actor"] == pytest.approx(2 * STATE + WEIGHTS, abs=0.03)
    assert saved["scoring by the reference"] == pytest.approx(2 * STATE + WEIGHTS, abs=0.03)
    assert found["giving the engine the actor's weights"] == pytest.approx(COMMON + 3 * WEIGHTS, abs=0.03)


def test_an_engine_that_does_not_sleep_is_always_there(configure: Configure) -> None:
    asleep = needs(list(pool_turns(configure(), "all", 0, 80 * GIB)))
    awake = needs(list(pool_turns(configure("roles.rollout.sleep=off"), "all", 0, 80 * GIB)))
    assert awake["updating the actor"] - asleep["updating the actor"] == pytest.approx(40)
    assert "giving the engine the actor's weights" not in awake


def test_enough_is_enough(configure: Configure) -> None:
    check_fit(configure(), {"all": [device(80)]})  # 74.5
    peak = max(needs(list(pool_turns(configure(), "all", 0, 80 * GIB))).values())
    check_fit(configure(), {"all": [device(80, free=peak - 0.59)]})
    assert problems(configure(), {"all": [device(80, free=peak - 0.61)]})


def test_a_device_that_is_too_small(configure: Configure) -> None:
    (problem,) = problems(configure("roles.reference.offload=all"), {"all": [device(24)]})
    assert problem.splitlines() == [
        "pools.all: updating the actor needs 33.6 GiB on device 0 (NVIDIA Example), which has 24.0 of its 24.0 GiB to "
        "give:",
        "  actor: 24.0 GiB (weights 0.9, gradients 1.8, optimizer 5.5, activations 14.9, backward 0.8)",
        "  critic: 8.3 GiB (weights 0.9, gradients 1.8, optimizer 5.5)",
        "  all processes: 1.3 GiB (contexts 1.2, workspaces 0.1)",
        "  reference: 0.0 GiB, offloaded",
        "  ways out: roles.actor.recompute=selective or full; roles.actor.micro_batch_tokens below 16384 (at least "
        "384); roles.critic.offload=optimizer or all; more tp or pp, or more devices in "
        "the pool",
    ]


def test_the_ways_out_are_ways_out(configure: Configure) -> None:
    ways = ("roles.critic.offload=all", "roles.reference.offload=all", "roles.actor.offload=all")
    smaller = ("roles.actor.recompute=full", "roles.critic.recompute=full", "roles.actor.micro_batch_tokens=4096")
    check_fit(configure(*ways, *smaller), {"all": [device(24)]})
    (problem,) = problems(configure(*ways, *smaller, "roles.rollout.memory_fraction=0.95"), {"all": [device(24)]})
    assert problem.startswith("pools.all: generating needs 24.1 GiB") and "actor: 0.0 GiB, offloaded" in problem
    assert problem.splitlines()[-1].startswith("  ways out: roles.rollout.memory_fraction below 0.95; more tp")


def test_what_others_hold_on_a_device_is_not_there(configure: Configure) -> None:
    (problem,) = problems(configure(), {"all": [device(80, free=9.4)]})
    assert "which has 10.0 of its 80.0 GiB to give" in problem


def test_an_engines_share_is_too_small(configure: Configure) -> None:
    (problem,) = problems(configure("roles.rollout.memory_fraction=0.02"), {"all": [device(80)]})
    assert problem.startswith("roles.rollout.memory_fraction: 0.02 of a device of 80.0 GiB is 1.6 GiB, and an engine")
    assert "weights 0.9, key/value cache of one sequence 0.0, forward pass and sampler 1.1, overhead 0.2" in problem
    check_fit(configure("roles.rollout.memory_fraction=0.03"), {"all": [device(80)]})
    assert "memory_fraction of at least 0.03;" in problem


def test_every_pool_and_the_device_that_lacks_most(configure: Configure) -> None:
    pools = "pools={train: {devices_per_node: 4}, value: {devices_per_node: 1}, serve: {devices_per_node: 2}}"
    roles = ["roles.actor.pool=train", "roles.actor.pp=2", "roles.critic.pool=value", "roles.reference.pool=value"]
    config = configure(pools, *roles, "roles.rollout.pool=serve")
    enough = {"train": [device(24)] * 4, "value": [device(32)], "serve": [device(16), device(16)]}
    check_fit(config, enough)
    found = problems(config, {**enough, "serve": [device(16), device(16, free=7)], "train": [device(8)] * 4})
    # The first stage: 315,083,264 parameters, the optimizer shared by two ranks: 3.5 GiB. Two micro-batches in flight,
    # twelve layers each: 14.8. A layer's gradients and those between stages: 0.4. One process: 0.7. NCCL: its code, the
    # groups of replicas and of stages, what stages exchange, one engine to send to: 340 + 2 x 870 + 385 + 260 MiB.
    assert [problem.splitlines()[0] for problem in found] == [
        "pools.train: updating the actor needs 22.1 GiB on device 0 (NVIDIA Example), which has 8.0 of its 8.0 GiB to "
        "give:",
        "pools.serve: generating needs 10.0 GiB on device 1 (NVIDIA Example), which has 7.6 of its 16.0 GiB to give:",
    ]
    # To receive from two stages: 340 + 2 x 516 MiB.
    assert "all processes: 2.0 GiB (contexts 0.6, workspaces 0.1, NCCL 1.3)" in found[1]
    assert "rollout: 8.0 GiB (memory_fraction 8.0)" in found[1]
