"""Scoring rows by functions: what is decoded for them, and rows that no function is for."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from small_run import make_tiny_model

from megappo.config import RewardConfig
from megappo.data import batch
from megappo.rewards.functions import FunctionScorer

SOURCE = """
def by_tokens(data_source, solution_str, ground_truth, extra_info=None, *, response_tokens):
    return {"token_scores": [float(text == ground_truth) for text in response_tokens]}
"""


def rows_of(tokenizer: object, sources: list[str]) -> pa.Table:
    responses = [tokenizer(text)["input_ids"] for text in ("3+3", "12")[: len(sources)]]  # type: ignore[operator]
    return pa.table(
        {
            "id": pa.array([8, 5][: len(sources)], pa.int64()),
            "response_ids": pa.array(responses, pa.list_(pa.int32())),
            "data_source": sources,
            "ground_truth": ["3", "1"][: len(sources)],
            "extra_info": ["{}"] * len(sources),
        }
    )


@pytest.mark.parametrize("with_tokens", [False, True])
def test_batches_without_a_row_for_functions(tmp_path: Path, with_tokens: bool) -> None:
    tokenizer = make_tiny_model().make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "own.py").write_text(SOURCE)
    function = f"{tmp_path}/own.py:by_tokens" if with_tokens else "megappo.rewards.arithmetic"
    reward = RewardConfig(pool="score", model="scorer", by_source={"sums": function}, processes=1)
    scorer = FunctionScorer(str(tmp_path), reward, ["sums", "prose"], None)
    assert scorer._manager is not None
    with scorer._manager:
        both, prose = (scorer.score(rows_of(tokenizer, [first, "prose"])) for first in ("sums", "prose"))
        assert prose.schema == both.schema
        assert batch.column(prose, "id").tolist() == [8, 5]
        assert prose.column("response").to_pylist() == ["3+3", "12"]
        assert batch.column(prose, "score").tolist() == [0, 0]
        assert batch.column(both, "score").tolist() == ([2, 0] if with_tokens else [1, 0])
        assert not batch.column(prose, "failed").any()
        # Tokens have their texts looked up where a function takes them, and nowhere else.
        assert bool(scorer._words) == with_tokens
        if with_tokens:
            assert batch.split_rows(both, "token_scores")[0].tolist() == [1, 0, 1]
