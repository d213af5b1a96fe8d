"""The batch as the driver sees it: references to Arrow tables in the object store, joined by row id when read.

The driver passes references around and fetches only the columns it computes with. A worker gets the references of the
tables that hold its rows, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import ray
from ray.exceptions import GetTimeoutError, RayError

from megappo.cluster.calls import WorkerLost
from megappo.data import batch as rows_of


@dataclass(frozen=True)
class TableRef:
    """A table in the object store.

    Attributes:
        ref: the reference.
        ids: ids of its rows, int64.
        columns: its column names, ``id`` among them.
    """

    ref: ray.ObjectRef
    ids: np.ndarray
    columns: tuple[str, ...]


def get_table(refs: Sequence[TableRef], limit_s: float | None) -> pa.Table:
    """Fetch tables with the same columns, one under the other, into the driver.

    Args:
        limit_s: how long that may take, in seconds: the calls' limit.

    Raises:
        WorkerLost: a process or node is gone with them, or does not hand them over.
    """
    with _losses_told(limit_s):
        return pa.concat_tables(ray.get([table.ref for table in refs], timeout=limit_s))


@contextmanager
def _losses_told(limit_s: float | None) -> Iterator[None]:
    """Around what the driver fetches: the object store's errors as the loss that they are."""
    try:
        yield
    except GetTimeoutError:
        raise WorkerLost(f"rows of the batch did not come within run.timeout_s = {limit_s:g} s") from None
    except RayError as error:
        raise WorkerLost(f"rows of the batch are gone with the process that held them: {error}") from None


def put_table(table: pa.Table) -> TableRef:
    """Put a table with an ``id`` column into the object store."""
    return TableRef(ray.put(table), rows_of.column(table, "id"), tuple(table.column_names))


@dataclass(frozen=True)
class Selection:
    """Some rows and columns of a batch, as sent to a worker: references only.

    Attributes:
        ids: the rows, in order.
        columns: the columns wanted besides ``id``.
        parts: tables grouped by which columns they hold; within a group, each row is in one of the tables.
    """

    ids: np.ndarray
    columns: tuple[str, ...]
    parts: tuple[tuple[TableRef, ...], ...]

    def read(self, limit_s: float | None = None) -> pa.Table:
        """Fetch and join.

        Args:
            limit_s: how long fetching may take, in seconds; inside a worker it is the call that is limited.

        Raises:
            KeyError: a row or column that no table holds.
        """
        out = pa.table({"id": pa.array(self.ids, pa.int64())})
        for part in self.parts:
            wanted = [name for name in self.columns if name in part[0].columns]
            tables = [
                table.select(["id", *wanted]) for table in ray.get([table.ref for table in part], timeout=limit_s)
            ]
            out = rows_of.join_by_id(out, pa.concat_tables(tables))
        if missing := [name for name in self.columns if name not in out.column_names]:
            raise KeyError(f"no table of the batch holds the column {missing[0]!r}")
        return out.select(["id", *(name for name in self.columns if name != "id")])


@dataclass(frozen=True)
class Batch:
    """One step's batch.

    Attributes:
        ids: all rows, int64.
        tokens: places each row takes in a forward pass (prompt + response - 1), int64; work is balanced by it.
        response_tokens: int64.
        parts: see :class:`Selection`.
        loss_tokens: response tokens that train, int64; all where it is not given.
        limit_s: how long the driver waits for rows, in seconds; forever where it is not given.
    """

    ids: np.ndarray
    tokens: np.ndarray
    response_tokens: np.ndarray
    parts: tuple[tuple[TableRef, ...], ...]
    loss_tokens: np.ndarray | None = None
    limit_s: float | None = None

    @property
    def columns(self) -> frozenset[str]:
        """Names of all columns but ``id``."""
        return frozenset(name for part in self.parts for name in part[0].columns) - {"id"}

    @property
    def trained_tokens(self) -> np.ndarray:
        """Tokens of each row that a loss is taken of, int64."""
        return self.response_tokens if self.loss_tokens is None else self.loss_tokens

    def with_columns(self, *parts: Sequence[TableRef]) -> Batch:
        """The batch with more columns; each part's tables hold all rows between them."""
        return replace(self, parts=(*self.parts, *(tuple(part) for part in parts)))

    def take(self, ids: np.ndarray) -> Batch:
        """Only the rows with these ids, in their order; their tables stay as they are.

        Raises:
            KeyError: a row that is not in the batch.
        """
        order = np.argsort(self.ids, kind="stable")
        at = np.searchsorted(self.ids[order], ids)
        at = order[np.minimum(at, len(order) - 1)]
        if (self.ids[at] != ids).any():
            raise KeyError(f"row {ids[self.ids[at] != ids][0]} is not in the batch")
        return Batch(ids, self.tokens[at], self.response_tokens[at], self.parts, limit_s=self.limit_s)

    @staticmethod
    def joined(batches: Sequence[Batch]) -> Batch:
        """The rows of several batches with the same columns and different ids."""
        return Batch(
            np.concatenate([batch.ids for batch in batches]),
            np.concatenate([batch.tokens for batch in batches]),
            np.concatenate([batch.response_tokens for batch in batches]),
            tuple(sum(parts, ()) for parts in zip(*(batch.parts for batch in batches), strict=True)),
            limit_s=batches[0].limit_s,
        )

    def select(self, columns: Sequence[str], ids: np.ndarray | None = None) -> Selection:
        """Some columns of some rows (all by default), without fetching anything."""
        ids = self.ids if ids is None else ids
        needed = []
        for part in self.parts:
            if set(columns) & set(part[0].columns):
                holders = tuple(table for table in part if np.isin(table.ids, ids).any())
                needed.append(holders or part[:1])
        return Selection(ids, tuple(columns), tuple(needed))

    def read(self, *columns: str) -> pa.Table:
        """Fetch some columns of all rows.

        Raises:
            WorkerLost: a process or node is gone with the rows that it held, or does not hand them over.
        """
        with _losses_told(self.limit_s):
            return self.select(columns).read(self.limit_s)


def batch_of(rows: pa.Table, limit_s: float) -> Batch:
    """The batch of these rows, which have ``id``, ``prompt_ids``, ``response_ids`` and all else that it shall have.

    Args:
        limit_s: see :class:`Batch`; columns that workers add later are theirs, and may be gone with them.
    """
    responses = rows_of.lengths(rows, "response_ids")
    tokens = rows_of.lengths(rows, "prompt_ids") + responses - 1
    return Batch(rows_of.column(rows, "id"), tokens, responses, ((put_table(rows),),), limit_s=limit_s)
