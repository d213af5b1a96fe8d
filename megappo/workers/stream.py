"""Responses that one engine draws until a weight sync interrupts it, and goes on with after it.

A turn lasts from one weight sync to the next. It begins with responses as far as they are and ends with what they have
become; between turns nothing is left here. Within a turn, responses that are done are handed over as soon as they are
asked for, by other threads than the one that draws.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from megappo.data import batch
from megappo.data.progress import SCHEMA
from megappo.workers.rollout_engine import RolloutEngine
from megappo.workers.settings import Sampling


@dataclass
class Response:
    """As far as it is: tokens, their log-probabilities, and the versions of the weights that drew them."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str | None = None


class Stream:
    """Draws responses, a turn at a time."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._changed = threading.Condition()
        self._turn = self._ended = self._stopped = 0  # numbers of turns, which count from 1
        self._responses: dict[int, Response] = {}

    def run(self, turn: int, rows: pa.Table, sampling: Sampling, seed: int, version: int) -> pa.Table:
        """Draw until all responses are done or the turn is told to stop.

        Args:
            turn: its number, larger than any before.
            rows: ``id``, ``prompt_ids``, and ``response_ids``, ``rollout_logprobs`` and ``token_versions`` so far.
            sampling: for all rows.
            seed: of the sampler.
            version: of the weights that the caller means to sample from.

        Returns:
            The rows that :meth:`wait` did not hand over, in :data:`~megappo.data.progress.SCHEMA`.

        Raises:
            StaleWeightsError: the engine has other weights, or half of them.
        """
        self._engine.require(version)
        columns = ("response_ids", "rollout_logprobs", "token_versions")
        so_far = zip(*(batch.split_rows(rows, name) for name in columns), strict=True)
        ids = batch.column(rows, "id").tolist()
        with self._changed:
            self._turn = turn
            self._responses = {
                row: Response(*(values.tolist() for values in parts)) for row, parts in zip(ids, so_far, strict=True)
            }
        try:
            prompts = {row: ids.tolist() for row, ids in zip(ids, batch.split_rows(rows, "prompt_ids"), strict=True)}
            self._draw(prompts, sampling, seed, version)
        finally:
            with self._changed:
                self._ended = turn
                self._changed.notify_all()
        with self._changed:
            return as_table(self._responses)

    def wait(self, turn: int, ids: Iterable[int]) -> pa.Table:
        """Rows of a turn once they are done, which then are no more in it; fewer if it ends before."""
        wanted = set(ids)
        with self._changed:
            self._changed.wait_for(lambda: self._ended >= turn or (self._turn == turn and self._has(wanted)))
            done = {row: self._responses[row] for row in wanted if self._has({row})}
            for row in done:
                del self._responses[row]
            return as_table(done)

    def stop(self, turn: int) -> None:
        """Have a turn end, after the token that it is at; also one that has not begun."""
        with self._changed:
            self._stopped = max(self._stopped, turn)

    def _has(self, ids: set[int]) -> bool:
        return all(row in self._responses and self._responses[row].finish_reason for row in ids)

    def _draw(self, prompts: dict[int, list[int]], sampling: Sampling, seed: int, version: int) -> None:
        engine, turn = self._engine.engine.llm_engine, self._turn
        self._engine.seed(seed)
        drawing = dict(self._responses)
        for row, response in drawing.items():
            prompt = self._engine.prompt(prompts[row] + response.tokens)
            engine.add_request(str(row), prompt, self._engine.params(sampling, so_far=len(response.tokens)))
        while engine.has_unfinished_requests() and self._stopped < turn:
            for output in engine.step():
                response, (drawn,) = drawing[int(output.request_id)], output.outputs
                response.tokens += drawn.token_ids
                response.logprobs += drawn.logprobs.logprobs
                response.versions += [version] * len(drawn.token_ids)
                if output.finished:
                    with self._changed:
                        response.finish_reason = drawn.finish_reason
                        self._changed.notify_all()
        engine.abort_request([str(row) for row, response in drawing.items() if response.finish_reason is None])


def as_table(responses: dict[int, Response]) -> pa.Table:
    """Rows in :data:`~megappo.data.progress.SCHEMA`."""
    lengths = [len(response.tokens) for response in responses.values()]

    def ragged(name: str, dtype: type) -> pa.ListArray:
        flat = [value for response in responses.values() for value in getattr(response, name)]
        return batch.ragged(np.array(flat, dtype=dtype), lengths)

    columns = (ragged("tokens", np.int32), ragged("logprobs", np.float32), ragged("versions", np.int32))
    reasons = [response.finish_reason for response in responses.values()]
    return pa.table([list(responses), *columns, reasons], schema=SCHEMA)
