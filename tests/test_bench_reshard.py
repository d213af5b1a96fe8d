"""The benchmark of the weight sync: its three ways bring the same weights, ours with the fewest bytes."""

from __future__ import annotations

import pytest

from megappo.bench.reshard import LAYOUTS, WAYS, measure, transfer_of

pytestmark = pytest.mark.ranks


def test_all_ways_bring_the_same_weights() -> None:
    _, actor, engines, tp = LAYOUTS[2]
    rows = {str(row["way"]): row for row in measure(transfer_of(4, actor, engines, tp), rounds=1)}
    assert tuple(rows) == WAYS
    for way in ("ours, unverified", "ours", "ours, gloo", "bare messages"):
        assert rows[way]["bytes / least"] == 1
    # One copy of the model less what rank 0 has already, and a whole one for each of four workers that need half of it.
    assert rows["gather, broadcast"]["bytes / least"] == pytest.approx((4 + 0.75) / 2, abs=0.2)
