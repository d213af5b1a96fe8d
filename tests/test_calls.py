"""Who is to blame when several calls fail, and whether starting over can help; pools that cannot come."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from ray.exceptions import ObjectReconstructionFailedError, OwnerDiedError

from megappo.cluster import calls
from megappo.cluster.calls import NAMED, Call, Calls, Pending, Place, Timed, WorkerFailed, WorkerLost, _Failure
from megappo.cluster.pools import PoolError, reserve_pools
from megappo.config import PoolConfig, RunConfig


@dataclass(frozen=True)
class RunAndPools:
    run: RunConfig
    pools: dict[str, PoolConfig]


def failure(rank: int, text: str, died: bool = False) -> _Failure:
    place = Place("actor", rank, "train", f"10.0.0.{rank}", f"logs/train-rank{rank}.log")
    return _Failure(Call(place, "update", cast(Any, None)), text, died)


@pytest.mark.parametrize(
    "text",
    [
        "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
        "RuntimeError: CUDA error: unspecified launch failure\nCUDA kernel errors might be reported asynchronously",
    ],
)
def test_a_device_that_broke_is_a_loss_and_the_cause(text: str) -> None:
    error = Calls(1.0)._blame([failure(0, "DistBackendError: NCCL error in: ..."), failure(1, text)])
    assert isinstance(error, WorkerLost) and not error.died  # starting over may help; the process itself lives
    assert str(error).startswith("actor rank 1 (pool train, node 10.0.0.1): its device broke in update:\n" + text)
    assert str(error).endswith("then also failed: actor rank 0 (pool train, node 10.0.0.0)")


def test_who_waited_out_a_limit_comes_before_those_whom_its_end_cut_off() -> None:
    gone = failure(0, "TransferError: engine 0 worker 0 took nothing and is gone (Connection closed by peer)")
    late = failure(1, "TransferError: actor rank 1 sent nothing within 4.5 s (Timed out waiting)")
    error = Calls(1.0)._blame([gone, late])
    assert isinstance(error, WorkerLost) and str(error).startswith("actor rank 1 ") and "within 4.5 s" in str(error)


def test_of_hundreds_that_failed_too_a_few_are_named() -> None:
    dead = failure(400, "The actor is dead", died=True)
    error = Calls(1.0)._blame([*(failure(rank, "NCCL error: connection closed") for rank in range(300)), dead])
    last = str(error).splitlines()[-1]
    assert last.startswith("then also failed: actor rank 0 (pool train, node 10.0.0.0), actor rank 1 (")
    assert last.count("actor rank") == NAMED and last.endswith(f") and {300 - NAMED} more")


def test_an_error_of_the_program_is_none() -> None:
    wrong = "RuntimeError: CUDA error: device-side assert triggered"
    error = Calls(1.0)._blame([failure(0, "NCCL error: connection closed"), failure(1, wrong)])
    assert isinstance(error, WorkerFailed) and not isinstance(error, WorkerLost)
    assert str(error).startswith("actor rank 1 (pool train, node 10.0.0.1) failed in update:")


@pytest.mark.parametrize("error", [OwnerDiedError, ObjectReconstructionFailedError])
def test_rows_that_are_gone_with_another_process_or_node_are_a_loss(error: type[Exception]) -> None:
    text = f"Traceback (most recent call last):\nray.exceptions.{error.__name__}: Failed to retrieve object 85748392"
    assert isinstance(Calls(1.0)._blame([failure(0, text)]), WorkerLost)


def test_a_death_is_a_loss_of_who_died() -> None:
    dead = failure(1, "The actor is dead", died=True)
    error = Calls(1.0)._blame([dead])
    assert isinstance(error, WorkerLost) and error.died == {dead.call.place}


@dataclass
class Played:
    """Stands for Ray and for the clock: a reference is the time at which its call ends, in seconds."""

    now: float = 0.0

    def monotonic(self) -> float:
        return self.now

    def wait(self, ends: list[float], num_returns: int, timeout: float) -> tuple[list[float], list[float]]:
        self.now = min(*ends, self.now + timeout)
        return [end for end in ends if end <= self.now][:num_returns], []

    def get(self, end: float) -> Timed:
        return Timed(end, 0.0, end)


@pytest.mark.parametrize(
    ("ends", "late"),
    [
        ({0: [8.0, 16.0, 24.0]}, None),  # each takes 8 s
        ({0: [8.0, 19.0]}, 18.0),
        ({0: [8.0, 16.0], 1: [15.0]}, 10.0),  # another process has nothing to wait for
    ],
)
def test_the_time_of_a_call_begins_when_its_process_comes_to_it(
    monkeypatch: pytest.MonkeyPatch, ends: dict[int, list[float]], late: float | None
) -> None:
    played = Played()
    for name in ("ray", "time"):
        monkeypatch.setattr(calls, name, played)
    watched, started = Calls(10.0), []
    for rank, times in ends.items():
        for role, end in zip(("critic", "actor", "reference"), times, strict=False):
            place = Place(role, rank, "train", "10.0.0.1", f"train-rank{rank}.log")
            started.append(watched.start(place, "update", cast(Any, end)))
    if late is None:
        assert watched.gather(Pending(tuple(started), list)) == [ends[0]]
    else:
        with pytest.raises(WorkerLost, match=r"no answer within run\.timeout_s = 10 s"):
            watched.gather(Pending(tuple(started), list))
        assert played.now == late


def test_one_machine_is_not_two_nodes(tmp_path: Path) -> None:
    """Nothing would ever come that could be waited for."""
    nodes = {"train": PoolConfig(nodes=2, devices_per_node=4), "serve": PoolConfig(devices_per_node=1)}
    config = RunAndPools(RunConfig(dir=str(tmp_path), steps=1), nodes)
    with pytest.raises(PoolError) as caught:
        reserve_pools(config, 1.0, fixed=True)
    assert str(caught.value) == (
        "pools.train.nodes: 2, and this is one machine: give {nodes: 1, devices_per_node: 8}, or name a Ray cluster by "
        "RAY_ADDRESS"
    )
