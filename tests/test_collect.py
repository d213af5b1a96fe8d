"""Collecting a step's batch, with engines and rewards played by functions: rounds, ids, places in the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from megappo.ahead import Ahead
from megappo.cluster import dataflow
from megappo.cluster.dataflow import Batch, TableRef, batch_of
from megappo.collect import Collected, Collector, baseline_column
from megappo.config import (
    Config,
    DataConfig,
    DynamicSamplingConfig,
    MegatronRoleConfig,
    PoolConfig,
    PPOConfig,
    RewardConfig,
    RolesConfig,
    RolloutConfig,
    RunConfig,
)
from megappo.data import batch as rows_of
from megappo.data.progress import SCHEMA, merged
from megappo.data.prompts import PromptSet
from megappo.streamed import Streamed
from megappo.workers.settings import Sampling

PROMPTS, WANTED, SAMPLES = 10, 3, 2


@dataclass
class Played:
    """Engines that answer with the prompt's number, and a reward: of a prompt and a row's place among its samples."""

    score_of: Callable[[int, int], float]
    asked: list[tuple[list[int], Sampling, tuple[int, ...]]] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)
    tables: list[pa.Table] = field(default_factory=list)
    room: list[int] = field(default_factory=list)

    @contextmanager
    def room_for_rewards(self, version: int) -> Iterator[None]:
        self.room.append(version)
        yield
        self.room.append(len(self.scored))

    def put(self, table: pa.Table) -> int:
        self.tables.append(table)
        return len(self.tables) - 1

    def get(self, refs: list[int], timeout: float | None = None) -> list[pa.Table]:
        return [self.tables[ref] for ref in refs]

    @property
    def reward(self) -> Played:
        return self

    def gather(self, *pending: Any) -> list[Any]:
        return list(pending)

    def finish(self, batch: Batch) -> Batch:
        return batch

    def begin(
        self, requests: TableRef, tokens: np.ndarray, sampling: Sampling, *, samples: int, seed: Any, **versions: Any
    ) -> Batch:
        table = self.tables[requests.ref].select(["id", "prompt_index"])  # type: ignore[call-overload]
        prompts = rows_of.column(table, "prompt_index")
        self.asked.append((prompts[::samples].tolist(), sampling, seed))
        answers = pa.table(
            {"id": table.column("id"), "response_ids": rows_of.ragged(prompts.astype(np.int32), prompts * 0 + 1)}
        )
        parts = ((requests,), (dataflow.put_table(answers),))
        return Batch(requests.ids, tokens, np.ones_like(tokens), parts)

    def score(self, batch: Batch) -> Sequence[TableRef]:
        rows = batch.read("prompt_index")
        prompts, ids = rows_of.column(rows, "prompt_index"), rows_of.column(rows, "id")
        self.scored += ids.tolist()
        scores = [self.score_of(int(prompt), int(row) % SAMPLES) for prompt, row in zip(prompts, ids, strict=True)]
        failed = prompts == 2
        table = pa.table({"id": rows.column("id"), "score": pa.array(scores, pa.float32()), "failed": failed})
        return [dataflow.put_table(table)]


def collector(monkeypatch: pytest.MonkeyPatch, played: Played, max_rounds: int, **ppo: Any) -> Collector:
    monkeypatch.setattr(dataflow, "ray", played)
    config = Config(
        run=RunConfig(dir="run", steps=1, seed=7),
        model="model",
        data=DataConfig(train=("x",), prompts_per_step=WANTED, max_prompt=4, max_response=4, shuffle=False),
        pools={"all": PoolConfig(devices_per_node=1)},
        roles=RolesConfig(
            actor=MegatronRoleConfig(pool="all"),
            rollout=RolloutConfig(pool="all", samples_per_prompt=SAMPLES),
            reward=RewardConfig(function="x"),
        ),
        ppo=PPOConfig(
            mini_batch=2,
            actor_lr=1.0,
            dynamic_sampling=DynamicSamplingConfig(max_rounds=max_rounds) if max_rounds else None,
            **ppo,
        ),
    )
    table = pa.table(
        {"prompt_index": np.arange(PROMPTS), "prompt_ids": rows_of.ragged(np.arange(PROMPTS), [1] * PROMPTS)}
    )
    return Collector(config, played, PromptSet(table, ""))  # type: ignore[arg-type]


def prompts_of(collected: Collected) -> list[int]:
    return rows_of.column(collected.batch.read("prompt_index"), "prompt_index").tolist()


def test_further_prompts_until_the_batch_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only prompts 1, 4, 5, 8 and 9 tell their samples apart."""
    played = Played(lambda prompt, sample: float(sample and prompt in (1, 4, 5, 8, 9)))
    found = collector(monkeypatch, played, 5).collect(2, 0)
    # One of three is kept, so that the two that are missing take six; of those, 4, 5 and 8.
    assert [(prompts, seed) for prompts, _, seed in played.asked] == [([0, 1, 2], (7, 2)), ([3, 4, 5], (7, 2, 1))]
    assert prompts_of(found) == [1, 1, 4, 4, 5, 5]
    assert found.batch.ids.tolist() == [2, 3, 8, 9, 10, 11]
    assert (found.position, found.scored, found.drawn) == (6, True, (6, 6))
    assert played.scored == list(range(12))  # each once
    assert played.room == [2, 6, 2, 12]  # while the engines have given way
    assert rows_of.column(found.batch.read("score"), "score").tolist() == [0, 1, 0, 1, 0, 1]
    assert found.metrics == {
        "train/num_gen_batches": 2,
        "train/sampled_prompts": 6,
        "train/informative_prompts": 3,
    }
    again = collector(monkeypatch, played, 5).collect(3, found.position)
    assert prompts_of(again) == [8, 8, 9, 9, 1, 1]  # 6, 7, 8; then 9 and on from the beginning, of which 1
    assert again.position == 6 + 3 + 3


def test_what_is_missing_after_the_last_round_is_filled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(lambda prompt, sample: float(sample and prompt == 4))
    found = collector(monkeypatch, played, 2).collect(0, 0)
    assert prompts_of(found) == [4, 4, 0, 0, 1, 1]
    assert found.position == 6
    assert found.metrics["train/informative_prompts"] == 1


def test_without_dynamic_sampling_nothing_is_scored_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(lambda prompt, sample: 0.0)
    found = collector(monkeypatch, played, 0).collect(4, 8)
    assert prompts_of(found) == [8, 8, 9, 9, 0, 0]
    assert (found.position, found.scored, found.greedy, played.scored) == (11, False, None, [])


@pytest.mark.parametrize("max_rounds", [0, 5])
def test_a_greedy_response_to_each_prompt_of_the_batch(monkeypatch: pytest.MonkeyPatch, max_rounds: int) -> None:
    played = Played(lambda prompt, sample: prompt + 0.5 * sample)
    found = collector(monkeypatch, played, max_rounds, estimator="remax").collect(1, 1)
    assert found.greedy is not None
    prompts, sampling, _ = played.asked[-1]
    assert prompts == [1, 2, 3]
    assert (sampling.temperature, played.asked[0][1].temperature) == (0.0, 1.0)
    assert found.drawn == (6, 3)
    scores = Batch.with_columns(found.greedy, played.score(found.greedy))
    (column,) = baseline_column(found.batch.ids, scores)
    table = played.tables[column.ref]  # type: ignore[call-overload]
    assert table.column("id").to_pylist() == found.batch.ids.tolist()
    assert [int(value) for value in table.column("baseline").to_pylist()] == [1, 1, 2, 2, 3, 3]
    assert table.column("baseline_tokens").to_pylist() == [1] * 6
    assert table.column("baseline_failed").to_pylist() == [False, False, True, True, False, False]


def test_batches_of_dynamic_sampling_are_taken_up_by_engines_that_draw_all_the_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Their rows are numbered anew, or those of other steps could have the same numbers; scores are left behind."""
    at = collector(monkeypatch, Played(lambda prompt, sample: float(sample)), 0)
    rows = pa.table(
        {
            "id": np.array([2, 3, 8, 9, 10, 11]),
            "prompt_index": np.repeat([1, 4, 5], SAMPLES),
            "prompt_ids": rows_of.ragged(np.repeat([1, 4, 5], SAMPLES), [1] * 6),
            "response_ids": rows_of.ragged(np.arange(12, dtype=np.int32), [2] * 6),
            "rollout_logprobs": rows_of.ragged(np.zeros(12, np.float32), [2] * 6),
            "finish_reason": ["stop"] * 6,
            "weight_version": np.full(6, 1),
            "score": np.arange(6.0),
        }
    )
    ahead = Ahead(at.config, at)
    known = {"rounds": [6, 4], "metrics": {"train/num_gen_batches": 2.0}}
    ahead._ready[2] = Collected(batch_of(rows, 60.0), 9, scored=True, **known)
    ahead.save(tmp_path)
    again = Ahead(at.config, at)
    again.load(tmp_path)
    assert again._ready[2].drawn == (6, 4) and again._ready[2].metrics == {"train/num_gen_batches": 2.0}
    assert again._ready[2].batch.limit_s == at.config.run.timeout_s
    streamed = Streamed(at.config, at.cluster, at.prompts)
    streamed.load(tmp_path)
    (held,) = streamed._held.values()
    assert held.position == 9
    assert rows_of.column(held.rows, "id").tolist() == [12, 13, 14, 15, 16, 17]  # as those of a fresh step 2
    assert rows_of.column(held.rows, "prompt_index").tolist() == [1, 1, 4, 4, 5, 5]
    assert rows_of.flat(held.rows, "token_versions").tolist() == [1] * 12
    assert "score" not in held.rows.column_names
    fresh = streamed._fresh(3, 9).rows
    assert set(held.rows.column_names) == set(fresh.column_names)

    shorter = replace(at.config, data=replace(at.config.data, max_response=1))  # as a resumed run may have it
    streamed = Streamed(shorter, at.cluster, at.prompts)
    streamed.load(tmp_path)
    assert streamed._held == {}
    ahead = Ahead(shorter, at)
    ahead.load(tmp_path)
    assert ahead._ready == {}


def test_a_response_as_long_as_it_may_be_by_now_has_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its run was resumed with a smaller `data.max_response`: no token is left to ask the engines for."""
    at = collector(monkeypatch, Played(lambda prompt, sample: 0.0), 0)
    streamed = Streamed(at.config, at.cluster, at.prompts)
    held = streamed._fresh(2, 3)
    drawn = pa.table([rows_of.column(held.rows, "id")[:3], [[5, 6], [5], [7, 1]], [[-1.0, -1.0], [-1.0], [-1.0, -1.0]],
                      [[1, 1], [1], [1, 1]], [None, None, "stop"]], schema=SCHEMA)  # fmt: skip
    streamed._held = {2: replace(held, rows=merged(held.rows, drawn))}
    streamed.save(tmp_path)
    for max_response, ends in ((3, [None, None, "stop"]), (2, ["length", None, "stop"])):
        shorter = replace(at.config, data=replace(at.config.data, max_response=max_response))
        again = Streamed(shorter, at.cluster, at.prompts)
        again.load(tmp_path)
        (found,) = again._held.values()
        assert found.rows.column("finish_reason").to_pylist() == [*ends, None, None, None]
        assert rows_of.split_rows(found.rows, "response_ids")[0].tolist() == [5, 6]
