"""The rewards of a run as the driver sees them: functions in a process, a model on Megatron ranks, or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megappo.cluster.calls import Pending
from megappo.cluster.dataflow import Batch, TableRef, get_table, put_table
from megappo.cluster.groups import Group, MegatronGroup, tables
from megappo.config import RewardConfig
from megappo.rewards.mix import is_plain, mix
from megappo.rewards.reading import COLUMNS


@dataclass(frozen=True)
class RewardGroup:
    """What scores responses.

    Attributes:
        functions: the process that runs reward functions; it decodes the responses in any case.
        model: the reward model, if there is one.
        config: how they make up a score; see :func:`megappo.rewards.mix.mix`.
        tokenizer: folder of the actor's tokenizer.
    """

    functions: Group
    model: MegatronGroup | None
    config: RewardConfig
    tokenizer: str

    def judged(self, sources: Sequence[str]) -> np.ndarray:
        """bool: whether the reward model has a part in the score of a response, by its data source."""
        return np.array([self.config.weights_of(source).model != 0 for source in sources], dtype=bool)

    def score(self, batch: Batch) -> Pending[list[TableRef]]:
        """Score every response: ``score``, ``failed``, ``failure``, ``extras``, ``response``, parts of the score."""
        columns = ("response_ids", "data_source", "ground_truth", "extra_info")
        running = self.functions.each("run_functions", lambda _: (batch.select(columns),), tables)
        if is_plain(self.config):
            return running
        sources = batch.read("data_source").column("data_source").to_pylist()
        wanted = self.judged(sources)
        judging = None
        if self.model is not None and wanted.any():
            judging = self.model.score(
                "scores", batch.take(batch.ids[wanted]), columns=COLUMNS, tokenizer=self.tokenizer
            )
        calls = (*running.calls, *(judging.calls if judging else ()))

        def combine(results: list[Any]) -> list[TableRef]:
            said = get_table(running.combine(results[: len(running.calls)]), batch.limit_s)
            judged = get_table(judging.combine(results[len(running.calls) :]), batch.limit_s) if judging else None
            return [put_table(mix(said, judged, sources, batch.response_tokens, self.config))]

        return Pending(calls, combine)
