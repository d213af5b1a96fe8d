"""Given responses to score: text (``prompt`` and a column of responses), or what a run dumped (``RUN/rollouts``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megappo.data.examples import response_tokens
from megappo.data.given import Limits, checked_rows
from megappo.data.loss_mask import LOSS_MASK
from megappo.data.prompts import SCHEMA, DataError, ground_truth, prompt_columns, read_rows, tokenize_prompts

OPTIONAL = ("data_source", "reward_model", "extra_info")
DEFAULT_SOURCE = "responses"
ANSWERS = pa.schema(
    [("id", pa.int64()), *SCHEMA, ("response_ids", pa.list_(pa.int32())), ("finish_reason", pa.string())]
)
"""The columns of answers, as a run has them."""


def load_answers(path: str | Path, column: str, tokenizer: Any, *, limits: Limits) -> pa.Table:
    """Read and tokenize responses.

    Args:
        path: a parquet file with ``prompt``, the column and perhaps ``data_source``, ``reward_model`` and
            ``extra_info``; or one that a run dumped, whose tokens are taken as they are.
        column: that has the responses.
        limits: of the models that score.

    Returns:
        :data:`ANSWERS`, a row each, in the order of the file, with ``loss_mask`` where a dumped file has it; equal
        prompts have one ``prompt_index``.

    Raises:
        DataError: naming file and row: an empty or overlong response, or another row that no model takes; a file that
            cannot be used.
    """
    path = Path(path)
    table = _dumped(path) if column == "response" else None
    if table is None:
        table = _tokenized(path, column, tokenizer)
    return checked_rows(path, table, limits)


def _dumped(path: Path) -> pa.Table | None:
    """A run's dump, without what was computed from it; None if the file is none."""
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if not {*ANSWERS.names} - {"messages", "finish_reason"} <= {*names}:
                return None
            table = file.read([name for name in (*ANSWERS.names, LOSS_MASK) if name in names])
    except (pa.ArrowException, OSError):
        return None  # which is said with better words where the file is read
    if "messages" not in names:
        table = table.append_column("messages", pa.nulls(table.num_rows, pa.string()))
    if "finish_reason" not in names:  # as of text
        table = table.append_column("finish_reason", pa.array(["stop"] * table.num_rows, pa.string()))
    return table


def _tokenized(path: Path, column: str, tokenizer: Any) -> pa.Table:
    columns: dict[str, list[Any]] = {name: [] for name in ANSWERS.names}
    known: dict[str, int] = {}
    for first, rows in read_rows(path, ("prompt", column), (*OPTIONAL, LOSS_MASK)):
        if LOSS_MASK in rows[0]:
            raise DataError(
                f"{path}: has {LOSS_MASK}, which is of tokens, beside text: give prompt_ids and response_ids too, as a "
                "dumped batch has them, or leave it out"
            )
        texts, ids = tokenize_prompts(path, first, [row["prompt"] for row in rows], tokenizer)
        for offset, (row, text, tokens) in enumerate(zip(rows, texts, ids, strict=True)):
            where = f"{path}, row {first + offset} (counting from 0)"
            if not tokens:
                raise DataError(f"{where}: the prompt is empty: remove the row")
            truth = ground_truth(where, row["reward_model"]) if "reward_model" in row else ""
            values = {
                "id": first + offset,
                "prompt_index": known.setdefault(text, len(known)),
                "prompt_ids": tokens,
                "response_ids": response_tokens(where, row, column, tokenizer),
                "finish_reason": "stop",
                **prompt_columns({"data_source": DEFAULT_SOURCE, **row}, text, truth),
            }
            for name, value in values.items():
                columns[name].append(value)
    if not columns["id"]:
        raise DataError(f"{path}: no rows: name a file with at least one")
    return pa.table(columns, schema=ANSWERS)
