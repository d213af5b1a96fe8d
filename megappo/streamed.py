"""Several batches ahead: engines draw all the time, and responses go on across weight syncs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from megappo.ahead import usable, write_held
from megappo.cluster.cluster import Cluster
from megappo.cluster.dataflow import batch_of
from megappo.collect import Collected
from megappo.config import Config
from megappo.data import batch as rows_of
from megappo.data.order import PromptOrder
from megappo.data.progress import begun, cut_at, done, merged, taken_up, undone
from megappo.data.prompts import PromptSet
from megappo.data.requests import make_requests
from megappo.report.step_metrics import staleness_metrics
from megappo.workers.settings import Sampling


@dataclass(frozen=True)
class Held:
    """A batch on its way.

    Attributes:
        rows: as far as they are; see :mod:`megappo.data.progress`.
        position: prompts taken from the stream after it.
    """

    rows: pa.Table
    position: int


class Streamed:
    """In place of :class:`~megappo.ahead.Ahead` where ``ppo.staleness`` N is 2 or more.

    When a step begins, the engines are given the batches of the N steps after it as well, the older ones first. They
    draw while the step trains; a weight sync interrupts them, and what is not done goes on after it, from the new
    weights. Where that is in a response depends on the clock, so that two runs with the same seed differ.
    """

    def __init__(self, config: Config, cluster: Cluster, prompts: PromptSet) -> None:
        self.config, self.cluster, self.prompts = config, cluster, prompts
        self.order = PromptOrder(len(prompts), config.run.seed, config.data.shuffle)
        rollout = config.roles.rollout
        self.sampling = Sampling(rollout.temperature, rollout.top_p, rollout.top_k, config.data.max_response)
        self._held: dict[int, Held] = {}

    def collect(self, step: int, position: int) -> Collected:
        """See :meth:`megappo.ahead.Ahead.collect`."""
        last = min(step + self.config.ppo.staleness, self.config.run.steps - 1)
        for later in range(step, last + 1):
            if later not in self._held:
                self._held[later] = self._fresh(later, position)
            position = self._held[later].position
        engines = self.cluster.streaming
        while True:
            if not engines.is_running:
                self._start(step)
            missing = undone(self._held[step].rows)
            if not missing.num_rows:
                break
            self._merge(engines.wait(rows_of.column(missing, "id")))
        held = self._held.pop(step)
        rows = done(held.rows)
        batch = batch_of(rows, self.config.run.timeout_s)
        return Collected(batch, held.position, metrics=staleness_metrics(rows, step))

    def settle(self) -> None:
        """Interrupt the engines, before they get new weights."""
        if self.cluster.streaming.is_running:
            self._merge(self.cluster.streaming.stop())

    def save(self, folder: Path) -> None:
        """Write the batches that are on their way, as far as they are."""
        for step, held in self._held.items():
            folder.mkdir(exist_ok=True)
            write_held(folder / f"{step}.parquet", held.rows, {"position": held.position, "scored": False})

    def load(self, folder: Path) -> None:
        """Go on with what :meth:`save` wrote, at any ``ppo.staleness``; see :func:`~megappo.ahead.usable`."""
        self._held = {}
        longest = self.config.data.max_response  # less than before, perhaps
        for step, (rows, note) in usable(folder, longest).items():
            fresh = self._fresh(step, 0).rows  # whose ids no other batch here has, and nothing but what is drawn
            rows = rows.set_column(rows.column_names.index("id"), "id", fresh.column("id"))
            self._held[step] = Held(cut_at(taken_up(rows, fresh.column_names), longest), note["position"])

    def _fresh(self, step: int, position: int) -> Held:
        wanted, samples = self.config.data.prompts_per_step, self.config.roles.rollout.samples_per_prompt
        indices = self.order.take(position, wanted)
        requests = make_requests(self.prompts, indices, samples, first_id=step * wanted * samples)
        return Held(begun(requests.table), position + wanted)

    def _start(self, step: int) -> None:
        batches = [undone(self._held[later].rows) for later in sorted(self._held)]
        if batches := [rows for rows in batches if rows.num_rows]:
            self.cluster.streaming.start(batches, self.sampling, (self.config.run.seed, step), version=step)

    def _merge(self, found: pa.Table) -> None:
        self._held = {step: replace(held, rows=merged(held.rows, found)) for step, held in self._held.items()}
