"""Packing rows: each response token is predicted from the place before it, whatever shares its micro-batch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megappo.data import batch
from megappo.workers.micro_batch import MicroBatch, make_micro_batches, sequence_lengths

LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=12)


def rows_of(lengths: list[tuple[int, int]]) -> pa.Table:
    """Rows whose every token is a number of its own; ``values`` repeats each response token as a float."""
    prompts, responses = [n for n, _ in lengths], [n for _, n in lengths]
    tokens = np.arange(1, 1 + sum(prompts) + sum(responses), dtype=np.int32)
    response = tokens[sum(prompts) :]
    return pa.table(
        {
            "id": pa.array([10 * i + 3 for i in range(len(lengths))], pa.int64()),
            "prompt_ids": batch.ragged(tokens[: sum(prompts)], prompts),
            "response_ids": batch.ragged(response, responses),
            "values": batch.ragged(response.astype(np.float32), responses),
        }
    )


def pack(table: pa.Table, token_budget: int = 17, multiple: int = 1) -> list[MicroBatch]:
    return make_micro_batches(
        table, token_budget=token_budget, multiple=multiple, columns=["values"], device=torch.device("cpu")
    )


def sequence_at(micro: MicroBatch, row: int) -> tuple[list[int], list[int]]:
    """Tokens and positions of the packed sequence that holds a place."""
    starts = micro.packed.cu_seqlens_q.tolist()
    begin, end = next((a, b) for a, b in pairwise(starts) if a <= row < b)
    return micro.input_ids_1t[0, begin : row + 1].tolist(), micro.position_ids_1t[0, begin:end].tolist()


@given(LENGTHS.filter(bool), st.integers(1, 4))
def test_each_response_token_is_predicted_from_all_before_it(lengths: list[tuple[int, int]], multiple: int) -> None:
    table = rows_of(lengths)
    expected = {}  # by response token: everything that comes before it in its row
    for prompt, response in zip(*(table.column(k).to_pylist() for k in ("prompt_ids", "response_ids")), strict=True):
        for at, token in enumerate(response):
            expected[token] = prompt + response[:at]
    found = {}
    for micro in pack(table, multiple=multiple):
        for row, target in zip(micro.rows_n.tolist(), micro.targets_n.tolist(), strict=True):
            seen, positions = sequence_at(micro, row)
            assert target not in found
            found[target] = seen
            assert positions == list(range(len(positions)))
    assert found == expected


@given(LENGTHS.filter(bool), st.integers(17, 60), st.integers(1, 4))
def test_budget_padding_and_bookkeeping(lengths: list[tuple[int, int]], budget: int, multiple: int) -> None:
    table = rows_of(lengths)
    micros = pack(table, budget, multiple)
    assert sorted(i for micro in micros for i in micro.ids.tolist()) == table.column("id").to_pylist()
    responses = dict(zip(table.column("id").to_pylist(), table.column("response_ids").to_pylist(), strict=True))
    taken = dict(zip(table.column("id").to_pylist(), sequence_lengths(table).tolist(), strict=True))
    for micro in micros:
        ids = micro.ids.tolist()
        used = sum(taken[i] for i in ids)
        assert used <= budget
        assert micro.num_tokens % multiple == 0 and 0 <= micro.num_tokens - used < multiple
        assert micro.packed.cu_seqlens_q.dtype == torch.int32
        assert micro.packed.cu_seqlens_q[-1] == micro.num_tokens
        assert micro.packed.max_seqlen_q == micro.packed.cu_seqlens_q.diff().max()
        assert micro.input_ids_1t[0, used:].eq(0).all()
        assert micro.targets_n.tolist() == [token for i in ids for token in responses[i]]
        assert micro.lengths_b.tolist() == [len(responses[i]) for i in ids]
        assert micro.columns["values"].tolist() == micro.targets_n.tolist()
        for tensor in (micro.input_ids_1t, micro.position_ids_1t, micro.rows_n, micro.targets_n, micro.lengths_b):
            assert tensor.dtype == torch.int64


def test_one_row_written_out() -> None:
    (micro,) = pack(rows_of([(3, 2)]), multiple=4)
    assert micro.input_ids_1t.tolist() == [[1, 2, 3, 4]]  # 5 is predicted, never read
    assert micro.rows_n.tolist() == [2, 3]
    assert micro.targets_n.tolist() == [4, 5]


@pytest.mark.parametrize("multiple", [1, 2, 4])
def test_an_empty_shard_still_makes_a_pass(multiple: int) -> None:
    (micro,) = pack(rows_of([]), multiple=multiple)
    assert micro.num_tokens == multiple
    assert micro.packed.cu_seqlens_q.tolist() == [0, multiple]
    for nothing in (micro.ids, micro.rows_n, micro.targets_n, micro.lengths_b, micro.columns["values"]):
        assert len(nothing) == 0


def test_a_row_over_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="a row has 12 tokens, more than the budget of 11 tokens"):
        pack(rows_of([(7, 6)]), token_budget=11)


def test_sliced_rows_pack_as_whole_ones() -> None:
    """A data-parallel share is a slice of a larger table, whose other rows must not be seen."""
    whole = rows_of([(2, 3), (4, 1), (3, 3), (1, 2)])
    slice_, copy = whole.slice(1, 2), pa.Table.from_pylist(whole.slice(1, 2).to_pylist(), schema=whole.schema)

    def content(micro: MicroBatch) -> dict[str, Any]:
        return {"ids": micro.ids.tolist(), "tokens": micro.input_ids_1t.tolist(), "targets": micro.targets_n.tolist()}

    assert [content(m) for m in pack(slice_)] == [content(m) for m in pack(copy)]
