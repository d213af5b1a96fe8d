"""Responses that are not done yet: put together again, taken up from files, and dealt out to engines."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from megappo.data import batch
from megappo.data.progress import SCHEMA, begun, dealt_out, done, merged, taken_up, undone

REQUESTS = pa.table(
    {"id": pa.array([7, 8, 9]), "prompt_index": pa.array([4, 4, 5]), "prompt_ids": pa.array([[1], [1], [2, 3]])}
)


def found(**rows: tuple[list[int], list[int], str | None]) -> pa.Table:
    """Rows by id (after a letter): tokens, their versions, how it ended."""
    ids = [int(name[1:]) for name in rows]
    tokens, versions, ends = zip(*rows.values(), strict=True)
    logprobs = [[-0.5 * token for token in row] for row in tokens]
    return pa.table([ids, tokens, logprobs, versions, ends], schema=SCHEMA)


def test_what_is_found_replaces_what_was_there() -> None:
    rows = begun(REQUESTS)
    assert undone(rows).equals(rows)
    rows = merged(rows, found(r9=([5, 6], [0, 0], None), r7=([4], [0], "stop"), r33=([1], [0], "stop")))
    assert rows.column("id").to_pylist() == [7, 8, 9]
    assert rows.column("prompt_index").to_pylist() == [4, 4, 5]
    assert rows.column("response_ids").to_pylist() == [[4], [], [5, 6]]
    assert undone(rows).column("id").to_pylist() == [8, 9]
    rows = merged(rows, found(r9=([5, 6, 1], [0, 0, 2], "stop"), r8=([2, 2], [1, 3], "length")))
    assert undone(rows).num_rows == 0
    ended = done(rows)
    assert ended.column("weight_version").to_pylist() == [0, 1, 0]
    assert ended.column("last_weight_version").to_pylist() == [0, 3, 2]
    assert ended.column("rollout_logprobs").to_pylist() == [[-2], [-1, -1], [-2.5, -3, -0.5]]


def test_a_batch_that_was_drawn_whole_is_taken_up_too() -> None:
    whole = done(
        merged(begun(REQUESTS), found(r7=([4], [2], "stop"), r8=([3, 3], [2, 2], "length"), r9=([1], [2], "stop")))
    )
    plain = whole.drop_columns(["token_versions", "last_weight_version"])
    scored = plain.append_column("score", pa.array([0.0, 1.0, 1.0]))
    for rows in (plain, whole, scored):
        again = taken_up(rows, begun(REQUESTS).column_names)
        assert again.column("token_versions").to_pylist() == [[2], [2, 2], [2]]
        assert set(again.column_names) == {*REQUESTS.column_names, *SCHEMA.names}
        assert done(again).select(whole.column_names).equals(whole)


@given(st.lists(st.integers(1, 4), min_size=0, max_size=9), st.integers(1, 5))
def test_prompts_stay_together_and_are_spread_evenly(samples: list[int], hands: int) -> None:
    prompts = np.repeat(np.arange(len(samples)), samples)
    rows = pa.table({"id": np.arange(len(prompts)), "prompt_index": prompts})
    parts = dealt_out(rows, hands)
    assert len(parts) == hands
    assert pa.concat_tables(parts).equals(rows)
    held = [set(batch.column(part, "prompt_index").tolist()) for part in parts]
    assert sum(map(len, held)) == len(samples)
    assert max(map(len, held)) - min(map(len, held)) <= 1
