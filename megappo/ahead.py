"""Which batch is generated when: in its own step, or while the step before it trains."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megappo.cluster.dataflow import batch_of
from megappo.collect import Begun, Collected, Collector
from megappo.config import Config
from megappo.data import batch as rows_of
from megappo.data.order import PromptOrder
from megappo.data.progress import done, undone
from megappo.report.step_metrics import staleness_metrics

_GREEDY, _NOTE = "greedy_", b"megappo"


class Ahead:
    """The batches of a :class:`Collector`: with ``ppo.staleness`` 0, each is generated in its step, from its weights.

    With 1, it is generated while the step before trains, from that step's weights. The weight sync waits for it: no
    batch is drawn from two versions, and all follows from the seed.
    """

    def __init__(self, config: Config, collector: Collector) -> None:
        self._collector, self._steps, self._staleness = collector, config.run.steps, config.ppo.staleness
        self._max_response, self._limit_s = config.data.max_response, config.run.timeout_s
        self._begun: Begun | None = None
        self._ready: dict[int, Collected] = {}

    @property
    def order(self) -> PromptOrder:
        """Which prompts come next."""
        return self._collector.order

    def collect(self, step: int, position: int) -> Collected:
        """The batch of a step, of which the engines have the weights; the next one may begin.

        Args:
            position: prompts taken from the stream before it.
        """
        ready = self._ready.pop(step, None)
        collected = self._collector.collect(step, position) if ready is None else ready
        if not self._staleness:
            return collected
        if step + 1 < self._steps and step + 1 not in self._ready:
            self._begun = self._collector.begin(step + 1, collected.position, version=step)
        versions = collected.batch.read("weight_version")
        return replace(collected, metrics={**collected.metrics, **staleness_metrics(versions, step)})

    def settle(self) -> None:
        """Let the engines come to an end, before they get new weights."""
        if self._begun is not None:
            begun, self._begun = self._begun, None
            self._ready[begun.step] = self._collector.finish(begun)

    def save(self, folder: Path) -> None:
        """Write the batches that are still to be trained on, if any."""
        for step, collected in self._ready.items():
            folder.mkdir(exist_ok=True)
            note = {name: getattr(collected, name) for name in ("position", "scored", "rounds", "metrics")}
            write_held(folder / f"{step}.parquet", collected.batch.read(*sorted(collected.batch.columns)), note)
            if (greedy := collected.greedy) is not None:
                write_held(folder / f"{_GREEDY}{step}.parquet", greedy.read(*sorted(greedy.columns)), {})

    def load(self, folder: Path) -> None:
        """Go on with what :meth:`save` wrote, whatever ``ppo.staleness`` was then; see :func:`usable`.

        What is not done begins anew.
        """
        self._begun, self._ready = None, {}
        for step, (rows, note) in usable(folder, self._max_response).items():
            if undone(rows).num_rows:
                continue
            if "weight_version" not in rows.column_names:
                rows = done(rows)
            greedy = folder / f"{_GREEDY}{step}.parquet"
            more = batch_of(read_held(greedy)[0], self._limit_s) if greedy.exists() else None
            self._ready[step] = Collected(batch_of(rows, self._limit_s), greedy=more, **note)


def write_held(path: Path, rows: pa.Table, note: dict[str, Any]) -> None:
    """Write a batch and what is known of it beside."""
    pq.write_table(rows.replace_schema_metadata({_NOTE: json.dumps(note)}), path)


def read_held(path: Path) -> tuple[pa.Table, dict[str, Any]]:
    """Read what :func:`write_held` wrote."""
    rows = pq.read_table(path).combine_chunks()
    return rows.replace_schema_metadata(None), json.loads(rows.schema.metadata[_NOTE])


def usable(folder: Path, max_response: int) -> dict[int, tuple[pa.Table, dict[str, Any]]]:
    """The batches that were written into a folder, by step, and what is known of them.

    Those with a response that is longer than it may be by now (tokens) are left out, to be drawn again.
    """
    held = {int(path.stem): read_held(path) for path in sorted(folder.glob("[0-9]*.parquet"))}
    return {
        step: (rows, note)
        for step, (rows, note) in held.items()
        if rows_of.lengths(rows, "response_ids").max(initial=0) <= max_response
    }
