"""The driver's batch: references that are fetched, joined by id and cut to what a worker needs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from ray.exceptions import GetTimeoutError, OwnerDiedError

from megappo.cluster import dataflow
from megappo.cluster.calls import Pending, WorkerLost
from megappo.cluster.dataflow import Batch, TableRef, batch_of, get_table, put_table
from megappo.cluster.rewards import RewardGroup
from megappo.config import LengthPenaltyConfig, RewardConfig


class Store:
    """Ray's object store, as far as the batch uses it; counts what is fetched."""

    def __init__(self) -> None:
        self.tables: list[pa.Table] = []
        self.fetched: list[int] = []
        self.limits: list[float | None] = []
        self.failure: Exception | None = None

    def put(self, table: pa.Table) -> int:
        self.tables.append(table)
        return len(self.tables) - 1

    def get(self, refs: list[int], timeout: float | None = None) -> list[pa.Table]:
        self.fetched += refs
        self.limits.append(timeout)
        if self.failure is not None:
            raise self.failure
        return [self.tables[ref] for ref in refs]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()
    monkeypatch.setattr(dataflow, "ray", store)
    return store


def table(ids: list[int], **columns: Any) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64()), **columns})


@pytest.fixture
def batch(store: Store) -> Batch:
    """Prompts in one table; responses and values from two workers each, in orders of their own."""
    prompts = put_table(table([1, 2, 3, 4], prompt=["a", "b", "c", "d"]))
    responses = [put_table(table([2, 1], response=["B", "A"])), put_table(table([4, 3], response=["D", "C"]))]
    values = [put_table(table([3, 1], values=[3.0, 1.0])), put_table(table([2, 4], values=[2.0, 4.0]))]
    sizes = np.array([5, 6, 7, 8])
    return Batch(np.array([1, 2, 3, 4]), sizes, sizes - 3, ((prompts,),)).with_columns(responses, values)


def test_columns_are_joined_by_id(batch: Batch) -> None:
    rows = batch.read("values", "prompt", "response")
    assert rows.column("id").to_pylist() == [1, 2, 3, 4]
    assert rows.column("prompt").to_pylist() == ["a", "b", "c", "d"]
    assert rows.column("response").to_pylist() == ["A", "B", "C", "D"]
    assert rows.column("values").to_pylist() == [1.0, 2.0, 3.0, 4.0]


def test_some_rows_in_the_order_asked_for(batch: Batch) -> None:
    rows = batch.select(["response"], np.array([4, 2])).read()
    assert rows.to_pydict() == {"id": [4, 2], "response": ["D", "B"]}


def test_a_worker_gets_only_the_tables_that_hold_its_rows(batch: Batch, store: Store) -> None:
    selection = batch.select(["response", "values"], np.array([1, 2]))
    assert [[ref.ref for ref in part] for part in selection.parts] == [[1], [3, 4]]
    assert store.fetched == []
    selection.read()
    assert store.fetched == [1, 3, 4]


def test_no_rows_still_have_the_columns(batch: Batch) -> None:
    rows = batch.select(["values"], np.array([], dtype=np.int64)).read()
    assert (rows.num_rows, rows.column_names) == (0, ["id", "values"])


def test_adding_columns_leaves_the_batch_as_it_was(batch: Batch) -> None:
    more = batch.with_columns([put_table(table([4, 3, 2, 1], score=[4.0, 3.0, 2.0, 1.0]))])
    assert more.read("score").column("score").to_pylist() == [1.0, 2.0, 3.0, 4.0]
    assert len(batch.parts) == 3


def test_a_missing_column_is_named(batch: Batch) -> None:
    with pytest.raises(KeyError, match="no table of the batch holds the column 'ref_logprobs'"):
        batch.read("values", "ref_logprobs")


def test_a_missing_row_is_named(batch: Batch, store: Store) -> None:
    short = batch.with_columns([put_table(table([1, 2, 4], score=[1.0, 2.0, 4.0]))])
    with pytest.raises(KeyError, match="id 3"):
        short.read("score")


def test_rows_of_several_batches(batch: Batch) -> None:
    """Rounds of a step: their tables are read as one, and only the rows that were taken."""
    more = [put_table(table([11, 12], prompt=["k", "l"])), put_table(table([12, 11], response=["L", "K"]))]
    more.append(put_table(table([11, 12], values=[11.0, 12.0])))
    other = Batch(np.array([11, 12]), np.array([9, 4]), np.array([6, 1]), tuple((ref,) for ref in more))
    rows = Batch.joined([batch, other]).take(np.array([12, 3, 1]))
    assert (rows.tokens.tolist(), rows.response_tokens.tolist()) == ([4, 7, 5], [1, 4, 2])
    read = rows.read("prompt", "response", "values").to_pydict()
    assert read == {
        "id": [12, 3, 1],
        "prompt": ["l", "c", "a"],
        "response": ["L", "C", "A"],
        "values": [12.0, 3.0, 1.0],
    }
    with pytest.raises(KeyError, match="row 13 is not in the batch"):
        rows.take(np.array([1, 13]))


# --- what does not come ----------------------------------------------------------------------------------------------


LOSSES = pytest.mark.parametrize(
    ("failure", "told"),
    [
        (OwnerDiedError("85748392", b"", ""), "rows of the batch are gone with the process that held them: "),
        (GetTimeoutError(), r"rows of the batch did not come within run\.timeout_s = 7 s"),
    ],
    ids=["gone", "late"],
)


@LOSSES
def test_tables_that_do_not_come_are_a_loss(store: Store, failure: Exception, told: str) -> None:
    refs = [put_table(table([1], score=[1.0])), put_table(table([2], score=[2.0]))]
    assert get_table(refs, 7.0).column("score").to_pylist() == [1.0, 2.0] and store.limits == [7.0]
    store.failure = failure
    with pytest.raises(WorkerLost, match=told):
        get_table(refs, 7.0)


@LOSSES
def test_columns_that_workers_add_come_in_time_or_are_a_loss(store: Store, failure: Exception, told: str) -> None:
    """Also to a batch whose own rows are the driver's."""
    rows = table([3, 4], prompt_ids=[[1], [1, 2]], response_ids=[[5, 6], [7]])
    batch = batch_of(rows, 7.0).with_columns([put_table(table([4, 3], values=[4.0, 3.0]))])
    assert batch.tokens.tolist() == [2, 2]
    for one in (batch, batch.take(np.array([4])), Batch.joined([batch])):
        one.read("values")
    assert store.limits == [7.0] * 3
    store.failure = failure
    with pytest.raises(WorkerLost, match=told):
        batch.read("values")


class Functions:
    """A process that has scored everything at once."""

    def each(self, *_: Any) -> Pending[list[TableRef]]:
        scores = table([3, 4], score=np.zeros(2, np.float32), failed=[False] * 2, failure=[None] * 2)
        ref = put_table(scores)
        return Pending((), lambda _: [ref])


@LOSSES
def test_scores_that_do_not_come_are_a_loss(store: Store, failure: Exception, told: str) -> None:
    """Those that the driver makes one score of, once all have been told."""
    config, functions = RewardConfig(function="x", length_penalty=LengthPenaltyConfig(per_token=1.0)), Functions()
    rows = table([3, 4], prompt_ids=[[1], [1]], response_ids=[[5, 6], [7]], data_source=["a", "a"])
    scoring = RewardGroup(functions, None, config, "").score(batch_of(rows, 7.0))  # type: ignore[arg-type]
    (scored,) = scoring.combine([])
    assert store.tables[scored.ref].column("score").to_pylist() == [-2.0, -1.0]  # type: ignore[call-overload]
    assert store.limits == [7.0] * 2
    store.failure = failure
    with pytest.raises(WorkerLost, match=told):
        scoring.combine([])
