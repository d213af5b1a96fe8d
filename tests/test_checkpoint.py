"""A saved role goes on as if nothing had happened, at the same layout bit for bit, at another one to rounding."""

from __future__ import annotations

import multiprocessing
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from tiny import make_model, random_rows

from megappo.config import OptimizerConfig, PPOConfig
from megappo.data import batch
from megappo.layout.mesh import Layout

pytestmark = pytest.mark.ranks

ROWS = random_rows(6)
PPO = PPOConfig(
    mini_batch=6,
    actor_lr=1e-3,
    critic_lr=1e-3,
    optimizer=OptimizerConfig(eps=1e-4, weight_decay=0.1),  # moments count: they set the size of each step
)
Pieces = dict[tuple[str, tuple[int, ...]], np.ndarray]


def train(layout: Layout, critic: bool, dtype: str, plan: list[tuple[str, str]]) -> list[tuple[Any, Any]]:
    """Carry out ("fresh", model folder), ("update", ""), ("save", path), ("load", path), ("forget", "") (the moments).

    Returns after each: the gradient norm where there is one, and what this rank holds of the model.
    """
    import torch.distributed as dist

    from megappo.reshard.copies import block
    from megappo.workers.megatron_role import MegatronRole
    from megappo.workers.objectives import ActorObjective, CriticObjective
    from megappo.workers.settings import MiniBatch, RoleSettings, Totals

    # Megatron writes from forked children, which a daemon, as ranks are here, may not have.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    dp_rank = layout.coordinates(dist.get_rank())["dp"]
    rows, tokens = ROWS.num_rows, int(batch.lengths(ROWS, "response_ids").sum())
    step = MiniBatch(batch.column(ROWS, "id")[dp_rank :: layout.dp], Totals(rows, tokens))
    role: Any = None
    out: list[tuple[Any, Any]] = []
    for verb, path in plan:
        stats = None
        if verb == "fresh":
            role = MegatronRole(RoleSettings(path, layout, dtype, 64, critic, PPO.optimizer))
        elif verb == "update":
            objective = CriticObjective(PPO) if critic else ActorObjective(PPO, 1.0)
            stats = role.update(ROWS, [step], objective, 1e-3)
        elif verb == "save":
            role.save(path)
        elif verb == "save as Megatron does":
            save_gathered(role, path)
        elif verb == "load":
            role.load(path)
        else:
            for state in role.optimizer.chained_optimizers[0].optimizer.state.values():
                state["exp_avg"].zero_()
                state["exp_avg_sq"].zero_()
        pieces = {
            (b.name, b.offset): role.params[b.param][block(b.local_offset, b.size)].double().numpy().copy()
            for b in role.boxes()
        }
        out.append((stats and stats[("critic" if critic else "actor") + "/grad_norm"], pieces))
    return out


def save_gathered(role: Any, folder: str) -> None:
    """In Megatron's own way: every replica gathers the optimizer's state."""
    from megatron.core import dist_checkpointing

    Path(folder).mkdir(exist_ok=True)
    how = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
    metadata = {**how, "singleton_local_shards": False, "dp_cp_group": role.groups.dp_cp}
    weights = role.model.sharded_state_dict(metadata=metadata)
    state = role.optimizer.sharded_state_dict({"model": weights}, metadata=metadata)
    content = {key: value for key, value in metadata.items() if key != "dp_cp_group"}
    dist_checkpointing.save({"model": weights, "optimizer": state}, folder, content_metadata=content)


def whole(results: list[list[tuple[Any, Any]]], at: int) -> dict[str, np.ndarray]:
    """Full weights after one entry of the plan; replicas must agree."""
    pieces: Pieces = {}
    for rank in results:
        for key, values in rank[at][1].items():
            np.testing.assert_array_equal(pieces.setdefault(key, values), values)
    out = {}
    for name in {name for name, _ in pieces}:
        parts = {offset: values for (n, offset), values in pieces.items() if n == name}
        out[name] = np.full(np.max([np.add(o, v.shape) for o, v in parts.items()], axis=0), np.nan)
        for offset, values in parts.items():
            out[name][tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))] = values
    return out


def assert_equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray], tolerance: float = 0.0) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], atol=tolerance, rtol=0, err_msg=name)


def grad_norms(results: list[list[tuple[Any, Any]]], at: int) -> set[float]:
    return {rank[at][0] for rank in results if rank[at][0] is not None}


LARGE = Layout(tp=2, pp=2)
# A vocabulary of 70 is padded to 80 rows at tp 2 and to 72 at tp 1.
CASES: dict[str, tuple[dict[str, Any], bool, Layout, list[Layout]]] = {
    "actor": ({"vocab_size": 70}, False, LARGE, [Layout(dp=2), Layout(tp=2, sequence_parallel=True)]),
    "actor, tied, uneven stages": (
        {"tie_word_embeddings": True, "vocab_size": 70, "num_hidden_layers": 3},
        False,
        LARGE,
        [Layout(dp=2)],
    ),
    "actor, over data-parallel ranks": (
        {"vocab_size": 70},
        False,
        Layout(tp=2, dp=2),
        [Layout(), Layout(pp=2, dp=2)],
    ),
    "critic": ({}, True, LARGE, [Layout(dp=2), Layout(pp=2)]),
    "actor, tied, in chunks": (
        {"tie_word_embeddings": True, "vocab_size": 70, "num_hidden_layers": 4},
        False,
        Layout(pp=2, vpp=2),
        [Layout(tp=2)],
    ),
    "critic, over data-parallel ranks": ({}, True, Layout(dp=3), [Layout(tp=2), Layout(dp=2)]),
}


@pytest.mark.parametrize("case", CASES)
def test_resumed_run_equals_uninterrupted_one(tmp_path: Path, case: str) -> None:
    changes, critic, saver, others = CASES[case]
    folder = str(make_model(tmp_path / "model", **{"num_hidden_layers": 2, **changes}))
    other = str(make_model(tmp_path / "other", seed=1, **{"num_hidden_layers": 2, **changes}))
    saved = str(tmp_path / "checkpoint")
    plan = [("fresh", folder), ("update", ""), ("update", ""), ("save", saved), ("update", "")]
    plan += [("fresh", other), ("load", saved), ("update", "")]
    ran = run_ranks(saver.world, train, saver, critic, "float32", plan)
    assert np.abs(whole(ran, 3)["model.norm.weight"] - whole(ran, 5)["model.norm.weight"]).max() > 0
    assert_equal(whole(ran, 6), whole(ran, 3))
    assert_equal(whole(ran, 7), whole(ran, 4))
    assert grad_norms(ran, 7) == grad_norms(ran, 4)
    for layout in others:
        plan = [("fresh", other), ("load", saved), ("update", "")]
        resumed = run_ranks(layout.world, train, layout, critic, "float32", plan)
        assert_equal(whole(resumed, 1), whole(ran, 3))
        assert_equal(whole(resumed, 2), whole(ran, 4), tolerance=1e-6)
        assert grad_norms(resumed, 2).pop() == pytest.approx(grad_norms(ran, 4).pop(), rel=1e-5)


def test_lost_moments_would_be_seen(tmp_path: Path) -> None:
    """The comparison above has teeth: with Adam's moments set to zero, the next step differs by far more than 1e-6."""
    folder, saved = str(make_model(tmp_path / "model", num_hidden_layers=1)), str(tmp_path / "checkpoint")
    plan = [("fresh", folder), ("update", ""), ("update", ""), ("save", saved), ("update", "")]
    plan += [("load", saved), ("forget", ""), ("update", "")]
    ran = run_ranks(1, train, Layout(), False, "float32", plan)
    assert_equal(whole(ran, 6), whole(ran, 3))
    kept, lost = whole(ran, 4), whole(ran, 7)
    assert max(np.abs(kept[name] - lost[name]).max() for name in kept) > 1e-4


def test_bfloat16_keeps_its_float32_weights(tmp_path: Path) -> None:
    """The optimizer's own float32 weights are part of the checkpoint: rounding them would change the next steps."""
    folder, saved = str(make_model(tmp_path / "model", num_hidden_layers=2)), str(tmp_path / "checkpoint")
    plan = [("fresh", folder), *[("update", "")] * 2, ("save", saved), *[("update", "")] * 3]
    plan += [("fresh", folder), ("load", saved), *[("update", "")] * 3]
    ran = run_ranks(2, train, Layout(dp=2), False, "bfloat16", plan)
    assert_equal(whole(ran, 8), whole(ran, 3))
    for step in (4, 5, 6):
        assert_equal(whole(ran, step + 5), whole(ran, step))


@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=4), data=st.data())
def test_a_range_of_a_flattened_tensor_is_cut_into_few_blocks(shape: list[int], data: st.DataObject) -> None:
    from megappo.workers.optimizer_blocks import range_blocks

    begin, end = sorted(data.draw(st.lists(st.integers(0, prod(shape)), min_size=2, max_size=2, unique=True)))
    tensor = np.arange(prod(shape)).reshape(shape)
    blocks = list(range_blocks(begin, end, shape))
    found = [tensor[tuple(slice(o, o + n) for o, n in zip(*block, strict=True))].ravel() for block in blocks]
    np.testing.assert_array_equal(np.concatenate(found), np.arange(begin, end))
    assert len(blocks) <= 2 * len(shape) - 1


def test_a_checkpoint_that_megatron_wrote_loads(tmp_path: Path) -> None:
    folder, saved = str(make_model(tmp_path / "model", num_hidden_layers=2)), str(tmp_path / "checkpoint")
    plan = [("fresh", folder), *[("update", "")] * 2, ("save as Megatron does", saved), ("update", "")]
    plan += [("fresh", folder), ("load", saved), ("update", "")]
    layout = Layout(tp=2, dp=2)
    ran = run_ranks(layout.world, train, layout, False, "bfloat16", plan)
    assert_equal(whole(ran, 6), whole(ran, 3))
    assert_equal(whole(ran, 7), whole(ran, 4))


def test_megatron_finds_what_it_would_have_written(tmp_path: Path) -> None:
    """It loads a checkpoint by the notes in it, and every key in its shape and type."""
    from megatron.core.dist_checkpointing import load_common_state_dict
    from torch.distributed.checkpoint import FileSystemReader

    folder, ours, theirs = str(make_model(tmp_path / "model")), str(tmp_path / "ours"), str(tmp_path / "theirs")
    plan = [("fresh", folder), ("update", ""), ("save", ours), ("save as Megatron does", theirs)]
    run_ranks(2, train, Layout(dp=2), False, "bfloat16", plan)
    assert load_common_state_dict(ours) == load_common_state_dict(theirs)
    found, expected = (
        {key: (entry.size, entry.properties.dtype) for key, entry in entries.items() if hasattr(entry, "size")}
        for entries in (FileSystemReader(path).read_metadata().state_dict_metadata for path in (ours, theirs))
    )
    assert found == expected


def test_replicas_share_the_work_of_a_checkpoint(tmp_path: Path) -> None:
    """Of the weights, which they all have, and of the optimizer's state, which they share."""
    folder, saved = str(make_model(tmp_path / "model", num_hidden_layers=3)), tmp_path / "checkpoint"
    run_ranks(3, train, Layout(dp=3), False, "bfloat16", [("fresh", folder), ("save", str(saved))])
    written = [sum(file.stat().st_size for file in saved.glob(f"__{rank}_*.distcp")) for rank in range(3)]
    assert max(written) < 1.2 * sum(written) / 3, written


def test_a_role_that_does_not_train_reads_a_trained_one(tmp_path: Path) -> None:
    folder, saved = str(make_model(tmp_path / "model", num_hidden_layers=2)), str(tmp_path / "checkpoint")
    ran = run_ranks(1, train, Layout(), False, "float32", [("fresh", folder), ("update", ""), ("save", saved)])
    read = run_ranks(2, frozen, folder, saved, Layout(tp=2))
    assert_equal(whole([[(None, pieces)] for pieces in read], 0), whole(ran, 1))


def frozen(folder: str, saved: str, layout: Layout) -> Pieces:
    from megappo.reshard.copies import block
    from megappo.workers.megatron_role import MegatronRole
    from megappo.workers.settings import RoleSettings

    role = MegatronRole(RoleSettings(folder, layout, "float32", 64))
    role.load(saved)
    return {
        (b.name, b.offset): role.params[b.param][block(b.local_offset, b.size)].double().numpy() for b in role.boxes()
    }
