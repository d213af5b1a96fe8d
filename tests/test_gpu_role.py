"""A Megatron role on CUDA (Transformer Engine, bfloat16) held against float32, and against itself with memory saved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tiny import make_model, random_rows

from megappo.bench.plain_torch import plain_logprobs
from megappo.config import LoraConfig, OptimizerConfig, PPOConfig
from megappo.data import batch
from megappo.layout.mesh import Layout
from megappo.models.lora import is_adapter

pytestmark = pytest.mark.gpu

ROWS = random_rows(40, longest=40)
PPO = PPOConfig(mini_batch=40, actor_lr=1e-3, critic_lr=1e-3, optimizer=OptimizerConfig())
SIZES = {"hidden_size": 256, "intermediate_size": 512, "scale": 0.05}


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    from megappo.models.process_groups import init_world, leave_world, seed_dropout
    from megappo.reshard.gloo import host_store

    store = host_store("127.0.0.1", 60)
    init_world(0, 1, "127.0.0.1", store.port, 120)
    seed_dropout(1)
    yield
    leave_world()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("qwen2"), "qwen2", **SIZES)


def make_role(folder: Path, dtype: str = "bfloat16", *, train: bool = True, tokens: int = 600, **settings: Any) -> Any:
    from megappo.workers.megatron_role import MegatronRole
    from megappo.workers.settings import RoleSettings

    return MegatronRole(
        RoleSettings(str(folder), Layout(), dtype, tokens, optimizer=PPO.optimizer if train else None, **settings)
    )


def update(role: Any, rows: pa.Table = ROWS) -> dict[str, float]:
    from megappo.workers.objectives import ActorObjective
    from megappo.workers.settings import MiniBatch, Totals

    totals = Totals(rows.num_rows, int(batch.lengths(rows, "response_ids").sum()))
    return role.update(rows, [MiniBatch(batch.column(rows, "id"), totals)], ActorObjective(PPO, 1.0), 1e-3)


def logprobs(role: Any) -> np.ndarray:
    table = role.logprobs(ROWS, column="found", temperature=1.0)
    return batch.flat(batch.take_ids(table, batch.column(ROWS, "id")), "found")


def transformers_logprobs(folder: Path, dtype: torch.dtype, device: str) -> np.ndarray:
    return np.concatenate(plain_logprobs(folder, ROWS, dtype, device))


@pytest.mark.parametrize(
    ("family", "more"), [("qwen2", {}), ("qwen3", {"head_dim": 64}), ("llama", {"tie_word_embeddings": True})]
)
def test_logprobs_lose_no_more_to_bfloat16_than_plain_torch(tmp_path: Path, family: str, more: dict[str, Any]) -> None:
    """Both round each activation to 8 bits, at other places; against float32 neither may be much worse."""
    folder = make_model(tmp_path, family, **SIZES, **more)
    exact = transformers_logprobs(folder, torch.float32, "cpu")
    ours = np.abs(logprobs(make_role(folder, train=False)) - exact)
    plain = np.abs(transformers_logprobs(folder, torch.bfloat16, "cuda") - exact)
    print(f"{family}: mean {ours.mean():.1e} (plain {plain.mean():.1e}), max {ours.max():.1e} ({plain.max():.1e}) nats")
    assert ours.mean() < 1.5 * plain.mean() and ours.max() < 3 * plain.max()


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_activations_change_nothing(folder: Path, recompute: str) -> None:
    plain, saving = make_role(folder), make_role(folder, recompute=recompute)
    for _ in range(3):
        wanted, found = update(plain), update(saving)
        for name in ("actor/pg_loss", "actor/grad_norm"):
            assert found[name] == pytest.approx(wanted[name], rel=1e-3, abs=1e-6)


def test_recomputing_saves_memory(folder: Path) -> None:
    many = random_rows(2000, longest=40)
    peaks = {}
    for recompute in ("none", "selective", "full"):
        role = make_role(folder, recompute=recompute, tokens=100_000)
        update(role, many)
        peaks[recompute] = update(role, many)["perf/max_memory_allocated_gb/actor"]
    print(f"peak GiB: {peaks}")
    assert peaks["full"] < 0.8 * peaks["selective"] < 0.64 * peaks["none"]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_adapters_beside_fused_layers_compute_what_merged_weights_do(
    folder: Path, tmp_path: Path, recompute: str
) -> None:
    """Transformer Engine's layers with the norm in them give the adapters its output; its gradient comes back."""
    from megappo.convert.command import convert
    from megappo.convert.options import Options

    role = make_role(folder, lora=LoraConfig(rank=8), recompute=recompute)
    before, frozen = logprobs(role), {name: p.clone() for name, p in role.params.items() if not is_adapter(name)}
    for _ in range(8):
        update(role)
    after = logprobs(role)
    assert all(torch.equal(role.params[name], weight) for name, weight in frozen.items())
    role.save(tmp_path / "actor")
    convert(tmp_path / "actor", tmp_path / "merged", Options(model=str(folder), dtype="float32", processes=1), print)
    rounding = np.abs(before - transformers_logprobs(folder, torch.float32, "cpu")).mean()
    gap = np.abs(after - transformers_logprobs(tmp_path / "merged", torch.float32, "cpu")).mean()
    moved = np.abs(after - before).mean()
    print(f"adapters, recompute {recompute}: mean {gap:.1e} nats from merged, {rounding:.1e} before; moved {moved:.1e}")
    assert gap < 4 * rounding < moved


@pytest.mark.parametrize("fp8", ["tensorwise", "blockwise"])
def test_eight_bits_lose_as_much_more_as_they_are_coarser(folder: Path, fp8: str) -> None:
    """A factor of a product keeps 3 bits of its fraction (e4m3) where bfloat16 keeps 7: 16 times the rounding."""
    exact = transformers_logprobs(folder, torch.float32, "cpu")
    plain, rough = make_role(folder), make_role(folder, fp8=fp8)
    fine, coarse = (np.abs(logprobs(role) - exact).mean() for role in (plain, rough))
    print(f"fp8 {fp8}: mean {coarse:.1e} nats, bfloat16 {fine:.1e}")
    assert fine < coarse < 16 * fine
    for _ in range(2):
        wanted, found = update(plain), update(rough)
        assert found["actor/grad_norm"] == pytest.approx(wanted["actor/grad_norm"], rel=0.1)


@pytest.mark.parametrize("offload", ["optimizer", "all"])
def test_offload_changes_nothing_and_empties_the_device(folder: Path, offload: str) -> None:
    from megappo.workers.offload import settle

    staying, moving = make_role(folder), make_role(folder, offload=offload)
    held = sum(param.nbytes for param in moving.params.values())
    settle()
    floor = torch.cuda.memory_allocated()
    for _ in range(3):
        np.testing.assert_array_equal(logprobs(staying), logprobs(moving))
        wanted, found = update(staying), update(moving)
        assert {name: value for name, value in found.items() if "memory" not in name} == {
            name: value for name, value in wanted.items() if "memory" not in name
        }
        before = torch.cuda.memory_allocated()
        moving.residence.rest()
        settle()
        freed = before - torch.cuda.memory_allocated()
        # Gradients, main weights and two moments, four bytes each for every two of a weight.
        assert freed >= (8 if offload == "optimizer" else 9) * held * 0.95
    assert torch.cuda.memory_allocated() <= floor + 9 * held  # the moments of the role that stays


def test_fifty_turns_do_not_grow(folder: Path) -> None:
    from megappo.workers.offload import settle

    role, taken = make_role(folder, offload="all"), []
    for _ in range(50):
        logprobs(role)
        role.residence.rest()
        update(role)
        role.residence.rest()
        settle()
        taken.append(torch.cuda.memory_allocated())
    assert len(set(taken[2:])) == 1, taken


@pytest.mark.parametrize("steps", [0, 1])
def test_a_checkpoint_goes_on_where_it_was(folder: Path, tmp_path: Path, steps: int) -> None:
    """Also before the first step, as while only the critic trains."""
    role = make_role(folder, offload="all")
    for _ in range(steps):
        update(role)
    role.residence.rest()
    role.save(tmp_path / "checkpoint")
    other = make_role(folder)
    other.load(tmp_path / "checkpoint")
    for _ in range(2):  # the second shows moments that were lost
        assert update(other)["actor/grad_norm"] == pytest.approx(update(role)["actor/grad_norm"], rel=1e-5)
    np.testing.assert_allclose(logprobs(other), logprobs(role), atol=1e-5)
