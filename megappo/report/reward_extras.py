"""What a score was made of, and what reward functions returned beside it."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megappo.data import batch
from megappo.rewards.mix import PARTS


def reward_extras(rows: pa.Table) -> dict[str, npt.NDArray[np.float64]]:
    """The parts of a score, and the numbers that functions returned beside it, by name: float64 [rows], nan for none.

    A row whose reward failed counts as 0, as its score does, in every number that other rows of its source have.
    """
    parsed = [{name: value for name, value in extras.items() if name != "pred"} for extras in _parsed(rows)]
    sources = rows.column("data_source").to_pylist()
    failed = batch.column(rows, "failed")
    known: dict[str, set[str]] = defaultdict(set)
    for source, extras in zip(sources, parsed, strict=True):
        known[source].update(extras)
    for row in np.flatnonzero(failed):
        parsed[row] = dict.fromkeys(known[sources[row]], 0.0)
    names = sorted(set().union(*known.values()))
    numbers = {name: np.array([extras.get(name, np.nan) for extras in parsed], dtype=float) for name in names}
    parts = {name: batch.column(rows, column) for column, name in PARTS.items() if column in rows.column_names}
    return {**numbers, **{name: values.astype(float) for name, values in parts.items()}}


def predictions(rows: pa.Table) -> npt.NDArray:
    """``pred`` of every row, what its reward function took for the answer: strings [rows], empty where there is none.

    Majorities are found by it.
    """
    return np.array([extras.get("pred", "") for extras in _parsed(rows)], dtype=object)


def _parsed(rows: pa.Table) -> list[dict[str, Any]]:
    return [json.loads(text or "{}") for text in rows.column("extras").to_pylist()]
