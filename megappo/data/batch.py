"""The batch: an Arrow table with one row per sample, ragged token columns, and rows that are joined by ``id``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc


def _chunk(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def column(table: pa.Table, name: str) -> npt.NDArray:
    """A scalar column as numpy, [rows]."""
    return _chunk(table, name).to_numpy(zero_copy_only=False)


def lengths(table: pa.Table, name: str) -> npt.NDArray[np.int64]:
    """Length of each list of a ragged column, int64 [rows]."""
    return pc.list_value_length(_chunk(table, name)).to_numpy(zero_copy_only=False).astype(np.int64)


def flat(table: pa.Table, name: str) -> npt.NDArray:
    """All values of a ragged column one after the other, [sum of lengths]; without a copy where Arrow allows."""
    return _chunk(table, name).flatten().to_numpy(zero_copy_only=False)


def ragged(values: npt.NDArray, row_lengths: Sequence[int] | npt.NDArray) -> pa.ListArray:
    """The inverse of :func:`flat`: cut ``values`` [sum of lengths] into lists of ``row_lengths`` [rows].

    Raises:
        ValueError: the lengths do not add up to the number of values.
    """
    offsets = np.concatenate([[0], np.cumsum(row_lengths)]).astype(np.int32)
    if offsets[-1] != len(values):
        raise ValueError(f"row lengths add up to {offsets[-1]}, but there are {len(values)} values")
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def split_rows(table: pa.Table, name: str) -> list[npt.NDArray]:
    """A ragged column as one array per row."""
    return np.split(flat(table, name), np.cumsum(lengths(table, name))[:-1]) if table.num_rows else []


def pad(table: pa.Table, name: str) -> tuple[npt.NDArray, npt.NDArray[np.bool_]]:
    """A ragged column right-padded with zeros: values [rows, longest] and the mask of real ones, bool."""
    row_lengths = lengths(table, name)
    mask = np.arange(max(row_lengths.max(initial=0), 1))[None, :] < row_lengths[:, None]
    values = flat(table, name)
    padded = np.zeros(mask.shape, dtype=values.dtype)
    padded[mask] = values
    return padded, mask


def unpad(values_bt: npt.NDArray, mask_bt: npt.NDArray[np.bool_]) -> pa.ListArray:
    """The inverse of :func:`pad`."""
    return ragged(values_bt[mask_bt], mask_bt.sum(axis=1))


def take_ids(table: pa.Table, ids: Sequence[int] | npt.NDArray) -> pa.Table:
    """The rows with these ids, in their order.

    Raises:
        KeyError: an id is not in the table, or stands there twice.
    """
    own = column(table, "id")
    order = np.argsort(own, kind="stable")
    if len(own) > 1 and (np.diff(own[order]) == 0).any():
        raise KeyError("the table holds an id twice")
    wanted = np.asarray(ids, dtype=np.int64)
    if len(wanted) and not len(own):
        raise KeyError(f"id {wanted[0]} is not in the table, which is empty")
    at = np.minimum(np.searchsorted(own[order], wanted), max(len(own) - 1, 0))
    rows = order[at] if len(own) else np.empty(0, dtype=np.int64)
    if (own[rows] != wanted).any():
        raise KeyError(f"id {wanted[own[rows] != wanted][0]} is not in the table")
    if len(rows) and (np.diff(rows) == 1).all():
        return table.slice(rows[0], len(rows))  # a slice copies nothing; a take copies everything
    return table.take(pa.array(rows))


def join_by_id(left: pa.Table, *others: pa.Table) -> pa.Table:
    """``left`` with the columns of ``others`` appended, matched by id, in the order of ``left``.

    Raises:
        KeyError: a row of ``left`` has no partner.
        ValueError: two tables have a column of the same name.
    """
    ids = column(left, "id")
    for other in others:
        matched = take_ids(other, ids)
        for name in matched.column_names:
            if name != "id":
                if name in left.column_names:
                    raise ValueError(f"both tables have a column {name!r}: drop one of the two")
                left = left.append_column(name, matched.column(name))
    return left
