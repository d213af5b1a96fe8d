"""The driver's batch: references that are fetched, joined by id and cut to what a worker needs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from megappo.cluster import dataflow
from megappo.cluster.dataflow import Batch, put_table


class Store:
    """Ray's object store, as far as the batch uses it; counts what is fetched."""

    def __init__(self) -> None:
        self.tables: list[pa.Table] = []
        self.fetched: list[int] = []

    def put(self, table: pa.Table) -> int:
        self.tables.append(table)
        return len(self.tables) - 1

    def get(self, refs: list[int], timeout: float | None = None) -> list[pa.Table]:
        self.fetched += refs
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
