"""Scoring a batch's responses by reward functions, from token ids on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import pyarrow as pa

from megappo.config import RewardConfig
from megappo.data import batch
from megappo.rewards.manager import SCHEMA, RewardManager
from megappo.rewards.mix import check_covered


def make_manager(reward: RewardConfig, log_file: str | None = None) -> RewardManager:
    """Resolve the reward functions, and start their processes.

    Raises:
        RewardError: one does not load, or is no function of four arguments.
        SandboxError: one runs code, and there is no sandbox for it.
    """
    return RewardManager(
        reward.function, reward.by_source, reward.timeout_s, reward.processes, log_file, asdict(reward.sandbox)
    )


class FunctionScorer:
    """Decodes responses, and has those of data sources with a reward function scored.

    Args:
        tokenizer_folder: of the actor.
        sources: all data sources that there are.
        log_file: what the functions print is appended here.

    Raises:
        RewardError: a data source that nothing scores, or a function that does not load.
    """

    def __init__(self, tokenizer_folder: str, reward: RewardConfig, sources: Sequence[str], log_file: str | None):
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
        self._words: dict[int, str] = {}
        self._sources = set(check_covered(sources, reward))
        self._manager = make_manager(reward, log_file) if self._sources else None

    def score(self, rows: pa.Table) -> pa.Table:
        """``score``, ``failed``, ``failure``, ``extras`` and the decoded ``response`` of each row.

        A row of a data source without a function has score 0. See :meth:`RewardManager.score`.

        Args:
            rows: ``id``, ``response_ids``, ``data_source``, ``ground_truth``, ``extra_info``.
        """
        responses = [ids.tolist() for ids in batch.split_rows(rows, "response_ids")]
        texts = self._tokenizer.batch_decode(responses, skip_special_tokens=True)
        chosen = [at for at, source in enumerate(rows.column("data_source").to_pylist()) if source in self._sources]
        ids = batch.column(rows, "id")
        empty = np.zeros(len(ids))
        scored = pa.table(
            {
                "id": ids,
                "score": empty,
                "failed": empty.astype(bool),
                "failure": [""] * len(ids),
                "extras": ["{}"] * len(ids),
            },
            schema=SCHEMA,
        )
        if self._manager is not None:
            words = None
            if self._manager.rewards_tokens:
                words = [[self._word(token) for token in responses[at]] for at in chosen]
            own_rows = rows.take(pa.array(chosen, pa.int64()))
            own = self._manager.score(own_rows, [texts[at] for at in chosen], words)
            scored = own if len(chosen) == len(ids) else _completed(scored, own, [len(one) for one in responses])
        return scored.append_column("response", pa.array(texts, pa.string()))

    def _word(self, token: int) -> str:
        if token not in self._words:
            self._words[token] = str(self._tokenizer.decode([token]))
        return self._words[token]


def _completed(scored: pa.Table, own: pa.Table, lengths: Sequence[int]) -> pa.Table:
    """All rows, those of ``own`` in place of their likes."""
    if "token_scores" in own.column_names:
        zeros = np.zeros(sum(lengths), np.float32)
        scored = scored.append_column("token_scores", batch.ragged(zeros, lengths).cast(pa.list_(pa.float32())))
    ids = batch.column(scored, "id")
    others = scored.filter(pa.array(~np.isin(ids, batch.column(own, "id"))))
    return batch.take_ids(pa.concat_tables([own, others]).combine_chunks(), ids)
