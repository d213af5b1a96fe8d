"""Responses that may not be done yet: rows of a batch with what is drawn of them so far."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from megappo.data import batch

SCHEMA = pa.schema(
    {
        "id": pa.int64(),
        "response_ids": pa.list_(pa.int32()),
        "rollout_logprobs": pa.list_(pa.float32()),
        "token_versions": pa.list_(pa.int32()),
        "finish_reason": pa.string(),
    }
)
"""What is drawn: tokens, the log-probability of each when it was drawn (nats), the version of the weights that drew it,
and why the response ended, null while it has not."""

DRAWN = tuple(name for name in SCHEMA.names if name != "id")


def begun(requests: pa.Table) -> pa.Table:
    """Rows of which nothing is drawn yet."""
    rows = requests.num_rows
    for name in DRAWN[:3]:
        empty = pa.array([[]] * rows, SCHEMA.field(name).type)
        requests = requests.append_column(name, empty)
    return requests.append_column("finish_reason", pa.nulls(rows, pa.string()))


def merged(rows: pa.Table, found: pa.Table) -> pa.Table:
    """The rows, those that are in `found` as far as they are there.

    Args:
        found: in :data:`SCHEMA`; rows that are not in `rows` are passed over.
    """
    ids = batch.column(rows, "id")
    new = found.filter(np.isin(batch.column(found, "id"), ids))
    old = rows.select(SCHEMA.names).cast(SCHEMA).filter(~np.isin(ids, batch.column(new, "id")))
    drawn = batch.take_ids(pa.concat_tables([new, old]).combine_chunks(), ids)
    return batch.join_by_id(rows.drop_columns(list(DRAWN)), drawn)


def taken_up(rows: pa.Table, columns: Collection[str]) -> pa.Table:
    """Rows as :func:`begun` and :func:`merged` make them, from a batch that was drawn whole or left unfinished.

    Args:
        columns: those that :func:`begun` makes; others, such as scores, are left behind.
    """
    if "token_versions" not in rows.column_names:
        lengths = batch.lengths(rows, "response_ids")
        versions = np.repeat(batch.column(rows, "weight_version").astype(np.int32), lengths)
        rows = rows.append_column("token_versions", batch.ragged(versions, lengths))
    return merged(rows.select([name for name in rows.column_names if name in columns]), SCHEMA.empty_table())


def cut_at(rows: pa.Table, max_response: int) -> pa.Table:
    """The rows, those that have not ended and have no token left to draw as ended with "length"."""
    full = pc.and_(pc.is_null(rows.column("finish_reason")), batch.lengths(rows, "response_ids") >= max_response)
    reasons = pc.if_else(full, "length", rows.column("finish_reason"))
    return rows.set_column(rows.column_names.index("finish_reason"), "finish_reason", reasons)


def undone(rows: pa.Table) -> pa.Table:
    """The rows that have not ended."""
    return rows.filter(pc.is_null(rows.column("finish_reason")))


def done(rows: pa.Table) -> pa.Table:
    """Rows that have all ended, with the versions of the first and the last weights that drew each.

    These are ``weight_version`` and ``last_weight_version``, int64.
    """
    versions = batch.flat(rows, "token_versions").astype(np.int64)
    ends = np.cumsum(batch.lengths(rows, "token_versions"))
    starts = ends - batch.lengths(rows, "token_versions")
    rows = rows.append_column("weight_version", pa.array(versions[starts]))
    return rows.append_column("last_weight_version", pa.array(versions[ends - 1]))


def dealt_out(rows: pa.Table, hands: int) -> list[pa.Table]:
    """Cut into as many parts, of about as many prompts each; a prompt's rows, which are neighbours, stay together."""
    prompts = batch.column(rows, "prompt_index")
    first = np.flatnonzero(np.diff(prompts, prepend=-1))  # row at which each prompt begins
    cuts = [part[0] if len(part) else rows.num_rows for part in np.array_split(first, hands)]
    cuts = [*np.minimum.accumulate(cuts[::-1])[::-1], rows.num_rows]
    return [rows.slice(start, stop - start) for start, stop in pairwise(cuts)]
