"""The benchmark of several devices, on CPU processes: its tables hold what a step really did."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from megappo.bench import multigpu, multigpu_layouts, reshard_ways
from megappo.bench.shapes import qwen_spec
from megappo.bench.table import BenchError
from megappo.layout.mesh import Layout
from megappo.reshard.actor_to_rollout import TransferSpec

pytestmark = pytest.mark.ranks


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is its run on CPU processes")
def test_every_part_comes_to_its_table(tmp_path: Path) -> None:
    multigpu.run("tiny", str(tmp_path), str(tmp_path / "tables.json"))
    tables = json.loads((tmp_path / "tables.json").read_text())
    layouts, scaling, sync, phases, pools = tables.values()

    for row in layouts:
        assert row["after update: nats from one rank"] < 1e-5, row
        assert row.get("before update: nats from float32", 0.0) < 1e-5, row
        for stat in ("pg_loss / one rank's", "grad_norm / one rank's"):
            assert row.get(stat, 1.0) == pytest.approx(1.0, abs=1e-4), row
    assert [row["layout"] for row in layouts] == [
        "one rank",
        *("tp1 pp1 dp2", "tp1 pp2 dp1 vpp2", "tp1 pp2 dp1", "tp2 pp1 dp1", "tp2 pp1 dp1 sp"),
        "tp1 pp1 dp2, with tp2 pp1 dp1 sp in the same processes",
        "tp1 pp1 dp2, saved and loaded as tp2 pp1 dp1 sp",
    ]

    assert [(row["devices"], row["sequences"]) for row in scaling] == [(1, 8), (2, 16), (2, 8)]
    assert scaling[0]["of perfect"] == 1 and all(row["tokens/s"] > 0 for row in scaling)

    ways = {row["way"]: row for row in sync}
    assert ways["ours"]["bytes / least"] == 1

    (seconds,) = phases
    parts = [value for name, value in seconds.items() if name != "step"]
    assert max(parts) < seconds["step"] < 60
    busy = {row["pool"]: row["busy"] for row in pools}
    assert {"train", "serve", "driver"} <= busy.keys()
    assert 0 < busy["serve"] < 1 and 0 < busy["train"] < 1
    log = (tmp_path / "tiny-multigpu" / "run" / "log.jsonl").read_text()
    assert len(re.findall(r'"step":', log)) == multigpu.multigpu_run.ON_CPU.steps


def test_weights_that_do_not_fit_are_left_out() -> None:
    """32.76 billion parameters: 61 GiB on one device that sends all, half of it on each worker of an engine of two."""
    assert multigpu.lacking("32b", 2, 80 << 30) == "89 GiB a device are needed, and there are 80"
    assert not multigpu.lacking("32b", 2, 90 << 30)
    assert not multigpu.lacking("32b", 8, 80 << 30)


def test_bare_messages_longer_than_their_memory_are_as_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reshard_ways, "BARE_BYTES", 1000)
    transfer = TransferSpec(qwen_spec("tiny"), Layout(), 1, 1, fused_norms=True)
    for rank in range(2):
        messages = reshard_ways.BareMessages(rank, transfer.part(rank), torch.bfloat16).messages
        sizes = [buffer.nbytes for _, _, buffer in messages]
        assert sum(sizes) == 2 * transfer.elements() and set(sizes[:-1]) == {1000} and 0 < sizes[-1] <= 1000


EXACT = {0: np.array([-1.0, -2.0]), 1: np.array([-3.0])}


def moved(nats: float) -> dict[int, np.ndarray]:
    return {index: values + nats for index, values in EXACT.items()}


def test_a_layout_may_lose_to_rounding_what_plain_torch_does_and_no_more() -> None:
    alone, plain = {"before": moved(0.015), "after": moved(0.5)}, moved(0.02)
    row = multigpu_layouts.compare("tp2", {"before": moved(-0.029), "after": moved(0.55)}, alone, EXACT, plain)
    assert row["before update: nats from float32"] == pytest.approx(0.029)
    assert row["before update: nats from one rank"] == pytest.approx(0.044)
    assert row["after update: nats from one rank"] == pytest.approx(0.05)
    with pytest.raises(BenchError, match=r"^tp2: 0\.031 nats from float32, where plain torch is 0\.02 from it$"):
        multigpu_layouts.compare("tp2", {"before": moved(-0.031)}, alone, EXACT, plain)
    with pytest.raises(BenchError, match=r"^tp2: 0\.061 nats from one rank, after the update; 0\.02 is rounding$"):
        multigpu_layouts.compare("tp2", {"before": moved(0.01), "after": moved(0.561)}, alone, EXACT, plain)


@pytest.mark.parametrize(("stat", "factor"), [("actor/grad_norm", 2.0), ("actor/pg_loss", 0.97)])
def test_a_layout_with_another_gradient_is_refused(stat: str, factor: float) -> None:
    """As where replicas are summed that are to be averaged; the weights after one step of Adam would not show it."""
    stats = {"actor/grad_norm": 3.0, "actor/pg_loss": -0.5}
    alone = {"before": EXACT, "after": EXACT, "stats": stats}
    row = multigpu_layouts.compare("dp2", alone, alone, EXACT, EXACT)
    assert row["grad_norm / one rank's"] == row["pg_loss / one rank's"] == 1
    with pytest.raises(BenchError, match=rf"^dp2: {stat} is {factor:g} times one rank's$"):
        found = {**alone, "stats": {**stats, stat: factor * stats[stat]}}
        multigpu_layouts.compare("dp2", found, alone, EXACT, EXACT)


def test_in_float32_next_to_nothing_is_rounding() -> None:
    alone = {"before": EXACT, "after": EXACT}
    multigpu_layouts.compare("tp2", {"before": moved(7e-5)}, alone, EXACT, EXACT)
    with pytest.raises(BenchError, match="8e-05 nats from float32, where plain torch is 0 from it"):
        multigpu_layouts.compare("tp2", {"before": moved(8e-5)}, alone, EXACT, EXACT)
