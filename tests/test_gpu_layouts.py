"""Layouts on NCCL with Transformer Engine. Ranks share a GPU where there are fewer of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_gpu_role import PPO, ROWS, SIZES, logprobs, transformers_logprobs, update
from tiny import make_model

from megappo.bench import multigpu_layouts
from megappo.bench.ranks import on_ranks
from megappo.bench.shapes import make_qwen
from megappo.layout.mesh import Layout

pytestmark = pytest.mark.gpu


def test_four_ranks_at_every_layout_compute_what_one_does(tmp_path: Path) -> None:
    rows = multigpu_layouts.measure(make_qwen(tmp_path / "tiny", "tiny", device="cuda"), 4)
    for row in rows:
        print({name: value if isinstance(value, str) else float(f"{value:.3g}") for name, value in row.items()})
        for stat in ("pg_loss / one rank's", "grad_norm / one rank's"):
            assert row.get(stat, 1.0) == pytest.approx(1.0, rel=0.02), row
    assert {"tp2 pp2 dp1 vpp2", "tp2 pp2 dp1 sp", "tp1 pp4 dp1", "tp2 pp1 dp2 sp", "tp1 pp1 dp4"} <= {
        row["layout"] for row in rows
    }


@pytest.mark.parametrize("fp8", ["tensorwise", "blockwise"])
def test_eight_bits_under_sequence_parallelism(tmp_path: Path, fp8: str) -> None:
    """What is gathered in 8 bits comes in whole blocks."""
    folder = make_model(tmp_path / "qwen2", "qwen2", **SIZES)
    exact = transformers_logprobs(folder, torch.float32, "cpu")
    (plain,) = on_ranks(1, numbers, str(folder), Layout(), "none")
    split = next(
        found for found in on_ranks(2, numbers, str(folder), Layout(tp=2, sequence_parallel=True), fp8) if found
    )
    fine, coarse = (np.abs(found["logprobs"] - exact).mean() for found in (plain, split))
    print(f"fp8 {fp8} at tp2 sp: mean {coarse:.1e} nats, bfloat16 on one rank {fine:.1e}")
    assert fine < coarse < 16 * fine
    assert split["grad_norm"] == pytest.approx(plain["grad_norm"], rel=0.1)


def numbers(folder: str, layout: Layout, fp8: str) -> dict[str, Any] | None:
    """On every rank; None where it reports nothing."""
    from megappo.workers.megatron_role import MegatronRole
    from megappo.workers.settings import RoleSettings

    role = MegatronRole(RoleSettings(folder, layout, "bfloat16", 600, optimizer=PPO.optimizer, fp8=fp8))
    found = logprobs(role) if role.reports else role.logprobs(ROWS, column="found", temperature=1.0)
    stats = update(role)
    return None if stats is None else {"logprobs": found, "grad_norm": stats["actor/grad_norm"]}
