"""What the engines are asked for: prompts, each as often as it is to be answered."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from megappo.data import batch
from megappo.data.prompts import PromptSet


@dataclass(frozen=True)
class Requests:
    """Prompts to generate from, one row a response.

    Attributes:
        table: ``id`` (int64, ascending one by one) and the columns of the prompts.
        prompt_tokens: length of each prompt, int64.
    """

    table: pa.Table
    prompt_tokens: np.ndarray


def make_requests(prompts: PromptSet, indices: np.ndarray, samples: int, first_id: int = 0) -> Requests:
    """``samples`` rows, next to each other, for each prompt of ``indices``, int64 [n]."""
    table = prompts.rows(np.repeat(indices, samples))
    table = table.append_column("id", pa.array(first_id + np.arange(table.num_rows), pa.int64()))
    return Requests(table, batch.lengths(table, "prompt_ids"))
