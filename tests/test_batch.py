"""The batch helpers: ragged columns there and back, rows by id, misaligned tables."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megappo.data import batch

LISTS = st.lists(st.lists(st.integers(-100, 100), max_size=5), max_size=8)


def table_of(rows: list[list[int]], chunks: int = 1, skip: int = 0) -> pa.Table:
    """Rows as a column ``x`` with ids 0.., of several chunks, behind ``skip`` rows that a slice hides."""
    junk = [[7, 7, 7]] * skip
    table = pa.table(
        {
            "id": pa.array([*range(-skip, 0), *range(len(rows))], pa.int64()),
            "x": pa.array(junk + rows, pa.list_(pa.int32())),
        }
    )
    edges = np.linspace(0, table.num_rows, chunks + 1).astype(int)
    parts = [table.slice(a, b - a) for a, b in pairwise(edges)]
    return pa.concat_tables(parts).slice(skip)


@given(LISTS, st.integers(1, 4), st.integers(0, 3))
def test_flat_and_lengths_see_only_the_rows_of_the_table(rows: list[list[int]], chunks: int, skip: int) -> None:
    table = table_of(rows, chunks, skip)
    assert batch.lengths(table, "x").dtype == np.int64
    assert batch.lengths(table, "x").tolist() == [len(row) for row in rows]
    assert batch.flat(table, "x").tolist() == [value for row in rows for value in row]
    assert [row.tolist() for row in batch.split_rows(table, "x")] == rows
    assert batch.column(table, "id").tolist() == list(range(len(rows)))


@given(LISTS, st.integers(1, 4), st.integers(0, 3))
def test_ragged_undoes_flat(rows: list[list[int]], chunks: int, skip: int) -> None:
    table = table_of(rows, chunks, skip)
    again = batch.ragged(batch.flat(table, "x"), batch.lengths(table, "x"))
    assert again.type == pa.list_(pa.int32())
    assert again.to_pylist() == rows


@given(LISTS, st.integers(1, 4), st.integers(0, 3))
def test_unpad_undoes_pad(rows: list[list[int]], chunks: int, skip: int) -> None:
    values_bt, mask_bt = batch.pad(table_of(rows, chunks, skip), "x")
    assert values_bt.shape == mask_bt.shape == (len(rows), max([1, *map(len, rows)]))
    assert values_bt.dtype == np.int32 and mask_bt.dtype == np.bool_
    for row, values, mask in zip(rows, values_bt, mask_bt, strict=True):
        assert values.tolist() == row + [0] * (len(values) - len(row))
        assert mask.tolist() == [True] * len(row) + [False] * (len(mask) - len(row))
    assert batch.unpad(values_bt, mask_bt).to_pylist() == rows


def test_ragged_keeps_the_dtype_and_shares_memory() -> None:
    values = np.arange(6, dtype=np.float32)
    lists = batch.ragged(values, [1, 0, 5])
    assert lists.type == pa.list_(pa.float32())
    assert np.shares_memory(lists.values.to_numpy(), values)


@pytest.mark.parametrize("lengths", [[3, 2], [4, 3], []])
def test_lengths_that_do_not_add_up_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=rf"row lengths add up to {sum(lengths)}, but there are 6 values"):
        batch.ragged(np.arange(6), lengths)


@given(st.permutations(range(8)), st.integers(0, 8), st.integers(1, 3))
def test_take_ids_gives_the_rows_in_the_order_asked_for(order: list[int], count: int, chunks: int) -> None:
    table = table_of([[i, i * i] for i in range(8)], chunks)
    taken = batch.take_ids(table, order[:count])
    assert taken.column("id").to_pylist() == order[:count]
    assert taken.column("x").to_pylist() == [[i, i * i] for i in order[:count]]


def test_take_ids_copies_nothing_for_neighbours() -> None:
    table = table_of([[i] for i in range(8)])
    taken = batch.take_ids(table, [3, 4, 5])
    address = table.column("id").chunk(0).buffers()[1].address
    assert taken.column("id").chunk(0).buffers()[1].address == address
    assert taken.column("x").to_pylist() == [[3], [4], [5]]


def test_take_ids_may_repeat_a_row() -> None:
    assert batch.take_ids(table_of([[5], [6]]), [1, 1, 0]).column("x").to_pylist() == [[6], [6], [5]]


@pytest.mark.parametrize("wanted", [5, -1, 2])
def test_take_ids_refuses_an_id_that_is_not_there(wanted: int) -> None:
    table = pa.table({"id": pa.array([4, 0, 1, 3], pa.int64())})
    with pytest.raises(KeyError, match=f"id {wanted} is not in the table"):
        batch.take_ids(table, [0, wanted])


def test_take_ids_refuses_a_table_that_holds_an_id_twice() -> None:
    with pytest.raises(KeyError, match="holds an id twice"):
        batch.take_ids(pa.table({"id": pa.array([4, 0, 4], pa.int64())}), [0])


def test_take_ids_of_an_empty_table() -> None:
    empty = table_of([])
    assert batch.take_ids(empty, []).num_rows == 0
    with pytest.raises(KeyError, match="id 3 is not in the table, which is empty"):
        batch.take_ids(empty, [3])


@given(st.permutations(range(6)), st.permutations(range(6)))
def test_join_matches_rows_by_id_whatever_their_order(a: list[int], b: list[int]) -> None:
    left = pa.table({"id": pa.array([2, 0, 1, 5, 4, 3], pa.int64()), "x": [20, 0, 10, 50, 40, 30]})
    first = pa.table({"id": pa.array(a, pa.int64()), "y": [i * 100 for i in a]})
    second = pa.table({"z": [[i] * i for i in b], "id": pa.array(b, pa.int64())})
    joined = batch.join_by_id(left, first, second)
    assert joined.column_names == ["id", "x", "y", "z"]
    assert joined.to_pylist() == [{"id": i, "x": i * 10, "y": i * 100, "z": [i] * i} for i in [2, 0, 1, 5, 4, 3]]


def test_join_refuses_a_row_without_partner() -> None:
    left = pa.table({"id": pa.array([0, 1], pa.int64())})
    with pytest.raises(KeyError, match="id 1 is not in the table"):
        batch.join_by_id(left, pa.table({"id": pa.array([0, 2], pa.int64()), "y": [1, 2]}))


def test_join_refuses_two_columns_of_one_name() -> None:
    left = pa.table({"id": pa.array([0], pa.int64()), "values": [1.0]})
    with pytest.raises(ValueError, match="both tables have a column 'values'"):
        batch.join_by_id(left, pa.table({"id": pa.array([0], pa.int64()), "values": [2.0]}))
