"""Which response tokens the policy produced: an optional column of a batch.

``loss_mask`` has a number (or bool) for each response token: 1 for what the policy produced, 0 for what came from
elsewhere, such as the output of a tool. Tokens with 0 are read as context; no loss, reward, advantage or statistic has
them. A batch without the column has produced everything.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megappo.data import batch

LOSS_MASK = "loss_mask"


class LossMaskError(ValueError):
    """A mask that does not fit its responses."""


def flat_mask(rows: pa.Table, like: str) -> npt.NDArray[np.bool_]:
    """The mask of all rows one after the other, bool [response tokens]; all true without the column.

    Args:
        rows: ``id``, a column with a value per response token, and perhaps ``loss_mask``.
        like: the name of that column.

    Raises:
        LossMaskError: a row's mask has another length than its response, something other than 0 and 1, or no 1.
    """
    lengths = batch.lengths(rows, like)
    if LOSS_MASK not in rows.column_names:
        return np.ones(lengths.sum(), dtype=bool)
    masks, own = batch.flat(rows, LOSS_MASK), batch.lengths(rows, LOSS_MASK)
    ids = batch.column(rows, "id")
    if (wrong := np.flatnonzero(own != lengths)).size:
        row = wrong[0]
        raise LossMaskError(f"loss_mask of row {ids[row]}: {own[row]} values for {lengths[row]} response tokens")
    if (wrong := np.flatnonzero((masks != 0) & (masks != 1))).size:
        row = np.searchsorted(np.cumsum(own), wrong[0], side="right")
        raise LossMaskError(f"loss_mask of row {ids[row]}: {masks[wrong[0]]} is neither 0 nor 1")
    mask = masks.astype(bool)
    if (wrong := np.flatnonzero(row_counts(mask, own) == 0)).size:
        raise LossMaskError(
            f"loss_mask of row {ids[wrong[0]]}: no token of its response is the policy's, so that there is nothing to "
            "train on: leave the row out"
        )
    return mask


def row_counts(mask: npt.NDArray[np.bool_], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Ones of each row of a flat mask, int64 [rows]."""
    upto = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
    ends = np.cumsum(lengths)
    return upto[ends] - upto[ends - lengths]


def was_cut(rows: pa.Table) -> npt.NDArray[np.bool_]:
    """Whether each response came to its limit before its end, bool [rows], by ``finish_reason``."""
    return np.array([reason == "length" for reason in rows.column("finish_reason").to_pylist()], dtype=bool)
