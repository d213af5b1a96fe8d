"""What leaves the device between turns comes back as it was, and really gives its memory up meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from test_update import PPO, ROWS, take_steps
from tiny import make_model

from megappo.layout.mesh import Layout
from megappo.workers.offload import Part, pinned, settle

pytestmark = pytest.mark.ranks


def test_a_part_gives_up_its_memory_and_comes_back() -> None:
    kept = torch.arange(6.0)
    view = kept[2:4]
    dropped = torch.ones(4)
    keeping, dropping = Part(lambda: [kept, view]), Part(lambda: [dropped], keep=False)
    keeping.leave()
    dropping.leave()
    assert not keeping.is_here and kept.untyped_storage().nbytes() == 24  # not before the copies are known to be done
    settle()
    assert kept.untyped_storage().nbytes() == dropped.untyped_storage().nbytes() == 0
    keeping.come_back()
    dropping.come_back()
    assert kept.tolist() == [0, 1, 2, 3, 4, 5] and view.tolist() == [2, 3]
    assert dropped.untyped_storage().nbytes() == 16


def test_memory_that_is_not_given_is_named_with_what_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    refuses = SimpleNamespace(cudaHostRegister=lambda *args: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: refuses)
    with pytest.raises(MemoryError, match=r"^weights: 0.0 GiB of host .* \(CUDA error 1\): raise .* \(ulimit -l\)$"):
        pinned(8, "weights")
    with pytest.raises(MemoryError, match=r"^what a role offloads: .* \(ulimit -l\), or set its offload to none$"):
        Part(lambda: [torch.zeros(3)]).leave()


def test_an_unchanged_part_is_not_copied_again() -> None:
    tensor = torch.zeros(3)
    part = Part(lambda: [tensor])
    part.leave()
    settle()
    part.come_back()
    tensor.fill_(7)
    part.leave(changed=False)  # the caller's word counts: the host still holds zeros
    settle()
    part.come_back()
    assert tensor.tolist() == [0, 0, 0]
    tensor.fill_(7)
    part.leave()
    part.come_back()  # turns round before its memory was given up
    assert tensor.tolist() == [7, 7, 7]


def turns(folder: str, layout: Layout, dtype: str, offload: str, critic: bool) -> tuple[Any, ...]:
    """Score, train, score again, with rests in between; what came out, and the bytes held while resting."""
    from megappo.workers.megatron_role import MegatronRole
    from megappo.workers.optimizer import gradient_buffers, state_tensors
    from megappo.workers.settings import RoleSettings

    role = MegatronRole(RoleSettings(folder, layout, dtype, 64, critic, PPO.optimizer, offload=offload))
    held = {}

    def rest(name: str, **options: bool) -> None:
        role.residence.rest(**options)
        settle()
        parts = {"weights": role.params.values(), "gradients": gradient_buffers(role.trained)}
        parts["optimizer"] = state_tensors(role.optimizer, role.params.values())
        held[name] = {key: sum(t.untyped_storage().nbytes() for t in tensors) for key, tensors in parts.items()}

    def score() -> Any:
        table = role.values(ROWS) if critic else role.logprobs(ROWS, column="out", temperature=1.0)
        return None if table is None else table.to_pylist()

    rest("at first")
    before = score()
    rest("after scoring")
    stats, _ = take_steps(role, critic, PPO)
    rest("after training", keep_weights=True)
    rest("in the end")
    after = score()
    weights = {name: np.array(param.float().tolist()) for name, param in role.params.items()}
    return before, stats, after, weights, held


@pytest.mark.parametrize(
    ("layout", "dtype", "critic"),
    [(Layout(), "bfloat16", False), (Layout(tp=2), "float32", True), (Layout(pp=2), "bfloat16", False)],
    ids=lambda value: getattr(value, "describe", lambda: str(value))(),
)
def test_training_does_not_notice(
    tmp_path_factory: pytest.TempPathFactory, layout: Layout, dtype: str, critic: bool
) -> None:
    folder = str(make_model(tmp_path_factory.mktemp("model")))
    staying = run_ranks(layout.world, turns, folder, layout, dtype, "none", critic)
    for offload in ("optimizer", "all"):
        for found, wanted in zip(
            run_ranks(layout.world, turns, folder, layout, dtype, offload, critic), staying, strict=True
        ):
            assert found[:3] == wanted[:3]
            for name, weight in wanted[3].items():
                np.testing.assert_array_equal(found[3][name], weight)
            resting, usual = found[4], wanted[4]["at first"]
            assert all(parts["gradients"] == parts["optimizer"] == 0 for parts in resting.values())
            assert usual["gradients"] > 0 and usual["optimizer"] > 0
            leaves = offload == "all"
            assert resting["after scoring"]["weights"] == (0 if leaves else usual["weights"])
            assert resting["after training"]["weights"] == usual["weights"]
            assert resting["in the end"]["weights"] == (0 if leaves else usual["weights"])
