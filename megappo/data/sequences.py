"""Whole sequences as rows of a batch: what is scored at its last token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megappo.data import batch


def ending_rows(ids: Sequence[int] | npt.NDArray, sequences: Sequence[npt.NDArray]) -> pa.Table:
    """Rows whose only target follows the sequence: the value before it is the value at the sequence's last token.

    Args:
        ids: of the rows, int64 [rows].
        sequences: token ids, int32 [tokens] each.

    Returns:
        ``id``, ``prompt_ids`` (the sequences) and ``response_ids`` (one token that no pass reads).
    """
    lengths = [len(sequence) for sequence in sequences]
    tokens = np.concatenate([np.empty(0, np.int32), *sequences]).astype(np.int32)
    count = len(sequences)
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "prompt_ids": batch.ragged(tokens, lengths),
            "response_ids": batch.ragged(np.zeros(count, np.int32), np.ones(count, np.int64)),
        }
    )


def joined(table: pa.Table) -> list[npt.NDArray]:
    """Prompt and response of each row, one after the other."""
    pairs = zip(batch.split_rows(table, "prompt_ids"), batch.split_rows(table, "response_ids"), strict=True)
    return [np.concatenate(pair) for pair in pairs]
