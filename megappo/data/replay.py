"""Batches that were dumped (``RUN/rollouts/step_N.parquet``) or scored (``megappo score``), to be trained on again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megappo.data import batch
from megappo.data.prompts import DataError

REQUIRED = (
    *("id", "prompt_index", "data_source", "ground_truth", "prompt_text", "prompt_ids"),
    *("response_ids", "rollout_logprobs", "finish_reason"),
)
"""What a step needs of its responses."""

SCORED = ("score", "failed", "failure", "extras", "response")
"""What scoring adds; rows that have it are not scored again."""

COMPUTED = ("logprobs", "entropies", "ref_logprobs", "values", "rewards", "advantages", "returns", "correction")
"""What a step computes anew."""


def load_replay(path: str | Path) -> pa.Table:
    """The rows of a file without what a step computes.

    Raises:
        DataError: naming the file: it cannot be read, lacks a column, repeats an id, or a row is empty or has another
            number of log-probabilities than tokens.
    """
    try:
        rows = pq.read_table(path).combine_chunks()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file: give a rollouts/step_N.parquet, or what megappo score wrote") from None
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as parquet ({str(error).splitlines()[0]}): write it again") from None
    scored = SCORED if "score" in rows.column_names else ()
    if missing := [name for name in (*REQUIRED, *scored) if name not in rows.column_names]:
        raise DataError(f"{path}: has no column {', '.join(missing)}: let megappo score make it from your responses")
    ids = batch.column(rows, "id")
    if rows.num_rows == 0 or len(np.unique(ids)) < len(ids):
        raise DataError(f"{path}: {'repeats an id' if rows.num_rows else 'has no rows'}: write it again")
    lengths = batch.lengths(rows, "response_ids")
    if (wrong := np.flatnonzero(lengths == 0)).size:
        raise DataError(f"{path}, row {wrong[0]} (counting from 0): the response is empty: remove the row")
    if (wrong := np.flatnonzero(lengths != batch.lengths(rows, "rollout_logprobs"))).size:
        raise DataError(
            f"{path}, row {wrong[0]} (counting from 0): rollout_logprobs has not a number for each token of the "
            "response: write it again"
        )
    if "score" in rows.column_names and not np.isfinite(batch.column(rows, "score")).all():
        at = np.flatnonzero(~np.isfinite(batch.column(rows, "score")))[0]
        raise DataError(f"{path}, row {at} (counting from 0): the score is no number: remove the row")
    dropped = {*COMPUTED, *(() if scored else SCORED)}
    return rows.drop_columns([name for name in rows.column_names if name in dropped])
