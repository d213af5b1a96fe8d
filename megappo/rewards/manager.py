"""Scores a batch of responses; a reward that is slow, raises, dies or returns nonsense costs its own row only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from megappo.rewards.pool import WorkerPool
from megappo.rewards.resolve import check_named, check_sources
from megappo.rewards.worker import Sample

SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("score", pa.float32()),
        ("failed", pa.bool_()),
        ("failure", pa.string()),
        ("extras", pa.string()),
    ]
)


class RewardManager:
    """Reward functions, run in processes of their own.

    Args:
        function: reference of the function (see `megappo.rewards.resolve`) for every source not in `by_source`.
        by_source: data_source -> reference.
        timeout_s: seconds one call may take; its process is killed then.
        processes: how many calls run at the same time.
        log_file: what the functions print, and the errors of their processes, are appended here; None: thrown away.
        sandbox: the fields of `roles.reward.sandbox`, for functions that run code; None: its defaults.

    Raises:
        RewardError: a reward that does not resolve, or none named; one that needs a sandbox, and there is none.
        ValueError: a time limit or a number of processes that is not positive.
    """

    def __init__(
        self,
        function: str | None,
        by_source: Mapping[str, str],
        timeout_s: float,
        processes: int,
        log_file: str | None = None,
        sandbox: Mapping[str, Any] | None = None,
    ):
        if timeout_s <= 0 or processes < 1:
            raise ValueError(f"timeout_s={timeout_s}, processes={processes}: both must be positive")
        check_named(function, by_source)
        self._has_default = function is not None
        self._by_source = dict(by_source)
        self._pool = WorkerPool(function, by_source, timeout_s, processes, log_file, sandbox)

    def check_sources(self, sources: Iterable[str]) -> None:
        """Raise RewardError, naming the sources known, where one of `sources` has no function."""
        check_sources(sources, self._has_default, self._by_source)

    @property
    def rewards_tokens(self) -> bool:
        """Whether some function takes the tokens of a response."""
        return self._pool.rewards_tokens

    def score(self, table: pa.Table, texts: Sequence[str], tokens: Sequence[Sequence[str]] | None = None) -> pa.Table:
        """Score the responses `texts`, one a row of `table`.

        Args:
            table: `id` int64, `data_source`, `ground_truth` and `extra_info` (JSON) strings; other columns are ignored.
            tokens: the text of each token of each response, for functions that reward tokens.

        Returns:
            A row for each row, in the same order: `id` int64; `score` float32, 0 where the row failed; `failed` bool;
            `failure` string, empty or what went wrong ("timeout after 10 s", "ValueError: ...", "returned nan",
            "killed by SIGSEGV"); `extras` string, the other numbers of the function's dict as JSON. Where some function
            rewards tokens also `token_scores`, ragged float32, a number for each token of every response, which are
            part of `score`.

        Raises:
            RewardError: a data source without a function; a process that cannot be started again.
            ValueError: numbers of rows and texts that differ.
        """
        if table.num_rows != len(texts):
            raise ValueError(f"{table.num_rows} rows and {len(texts)} texts; there must be one text a row")
        sources = table.column("data_source").to_pylist()
        self.check_sources(sources)
        truths = table.column("ground_truth").to_pylist()
        infos = table.column("extra_info").to_pylist()
        own = self.rewards_tokens and tokens is not None
        words = map(tuple, tokens) if own and tokens else [()] * len(texts)
        samples = [
            Sample(source, text, truth, info or "{}", each)
            for source, text, truth, info, each in zip(sources, texts, truths, infos, words, strict=True)
        ]
        outcomes = self._pool.run(samples)
        scored = pa.table(
            {
                "id": table.column("id"),
                "score": [outcome.score for outcome in outcomes],
                "failed": [bool(outcome.failure) for outcome in outcomes],
                "failure": [outcome.failure for outcome in outcomes],
                "extras": [outcome.extras for outcome in outcomes],
            },
            schema=SCHEMA,
        )
        if not own:
            return scored
        pairs = zip(outcomes, samples, strict=True)
        rewards = [outcome.token_scores or (0.0,) * len(sample.tokens) for outcome, sample in pairs]
        return scored.append_column("token_scores", pa.array(rewards, pa.list_(pa.float32())))

    def close(self) -> None:
        """End the processes; the manager cannot be used after."""
        self._pool.close()

    def __enter__(self) -> RewardManager:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
