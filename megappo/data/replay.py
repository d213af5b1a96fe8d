"""Batches that were dumped (``RUN/rollouts/step_N.parquet``) or scored (``megappo score``), to be trained on again."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from megappo.data.given import Limits, checked_rows
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


def load_replay(path: str | Path, limits: Limits | None = None) -> pa.Table:
    """The rows of a file without what a step computes.

    Args:
        path: of the file.
        limits: of the models that are to take the rows; see :func:`megappo.data.given.checked_rows`.

    Raises:
        DataError: naming the file: it cannot be read, lacks a column, or has a row that no step can take.
    """
    if not Path(path).is_file():
        raise DataError(f"{path}: no such file: give a rollouts/step_N.parquet, or what megappo score wrote")
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            scored = SCORED if "score" in names else ()
            missing = [name for name in (*REQUIRED, *scored) if name not in names]
            if not missing:
                dropped = {*COMPUTED, *(() if scored else SCORED)}
                rows = file.read([name for name in names if name not in dropped])
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as parquet ({str(error).splitlines()[0]}): write it again") from None
    if missing:
        raise DataError(f"{path}: has no column {', '.join(missing)}: let megappo score make it from your responses")
    if "extra_info" not in names:  # which reward functions are given
        rows = rows.append_column("extra_info", pa.array(["{}"] * rows.num_rows, pa.string()))
    return checked_rows(path, rows, limits)
