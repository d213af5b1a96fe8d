"""Rows of tokens that a file gives, dumped, scored or written by others: what must hold before they are used."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from megappo.config import Config
from megappo.data import batch
from megappo.data.loss_mask import LOSS_MASK, LossMaskError, flat_mask
from megappo.data.prompts import SCHEMA, DataError
from megappo.models.spec import read_model_spec

TYPES: dict[str, pa.DataType] = {
    "id": pa.int64(),
    **{field.name: field.type for field in SCHEMA},
    "response_ids": pa.list_(pa.int32()),
    "rollout_logprobs": pa.list_(pa.float32()),
    "finish_reason": pa.string(),
    "score": pa.float32(),
    "failed": pa.bool_(),
    "failure": pa.string(),
    "extras": pa.string(),
    "response": pa.string(),
}
"""Columns as a run has them; a file may have wider types."""

NULLABLE = ("messages",)

ROUNDING = 1e-3
"""By which a log-probability may be above 0: that of a token which is certain, in bfloat16 or float32."""


@dataclass(frozen=True)
class Limits:
    """What the models of a run take.

    Attributes:
        vocabulary: tokens that the actor knows.
        longest: tokens of prompt and response together that every role takes.
    """

    vocabulary: int
    longest: int


def limits_of(config: Config) -> Limits:
    """The limits of a run's models.

    Raises:
        ModelError: a model folder cannot be used.
    """
    roles = config.roles.megatron
    specs = {name: read_model_spec(config.model_folder(name)) for name in roles}
    positions = [spec.max_positions for spec in specs.values()]
    budgets = [role.micro_batch_tokens for role in roles.values()]
    return Limits(specs["actor"].vocab_size, min(*positions, *budgets))


def checked_rows(path: str | Path, rows: pa.Table, limits: Limits | None) -> pa.Table:
    """The rows, their columns in :data:`TYPES`; columns of other names are as they were.

    Args:
        path: for the words.
        rows: with ``id``, ``prompt_ids`` and ``response_ids`` at least.
        limits: of the models; without them, neither tokens nor lengths are held against any.

    Raises:
        DataError: naming file, row and value: a column of another kind, or one that comes twice, a null, an id that
            comes twice, an empty prompt or response, a token that is not in the vocabulary, a row that is too long,
            log-probabilities that are none or not one a token, a ``loss_mask`` that does not fit, a score that is no
            number; or no rows.
    """
    if rows.num_rows == 0:
        raise DataError(f"{path}: has no rows: write it again")
    names = rows.column_names
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"{path}: has {', '.join(twice)} twice: keep one column of each name")
    rows = rows.combine_chunks()
    known = [name for name in TYPES if name in names]
    for name in known:
        _check_type(path, rows, name)
    _check_ids(path, rows)
    for name in ("prompt_ids", "response_ids"):
        _check_tokens(path, rows, name, limits)
    lengths = batch.lengths(rows, "prompt_ids") + batch.lengths(rows, "response_ids")
    if limits is not None and (over := np.flatnonzero(lengths > limits.longest)).size:
        raise DataError(
            f"{_row(path, over[0])}: {lengths[over[0]]} tokens are more than the {limits.longest} that every role "
            "takes: remove the row, or raise micro_batch_tokens"
        )
    if "rollout_logprobs" in known:
        _check_logprobs(path, rows)
    if LOSS_MASK in names:
        _check_mask(path, rows)
    if "score" in known:
        with np.errstate(over="ignore"):
            scores = batch.column(rows, "score").astype(np.float32)
        if (wrong := np.flatnonzero(~np.isfinite(scores))).size:
            value = rows["score"][wrong[0]].as_py()
            raise DataError(f"{_row(path, wrong[0])}: the score is {value}, no number in float32: remove the row")
    for name in known:
        if rows[name].type != TYPES[name]:
            at = rows.column_names.index(name)
            rows = rows.set_column(at, name, pc.cast(rows[name], TYPES[name], safe=False))
    return rows


def _row(path: str | Path, row: int) -> str:
    return f"{path}, row {row} (counting from 0)"


def family(kind: pa.DataType) -> str:
    """A type as people say it, whatever its width."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"lists of {family(kind.value_type)}"
    if pa.types.is_dictionary(kind):
        return family(kind.value_type)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "strings"
    if pa.types.is_integer(kind):
        return "whole numbers"
    return "numbers" if pa.types.is_floating(kind) else str(kind)


def _check_type(path: str | Path, rows: pa.Table, name: str) -> None:
    """The kind of a column, and that nothing is missing in it."""
    column = rows[name].combine_chunks()
    found, wanted = family(column.type), family(TYPES[name])
    if pa.types.is_null(column.type) and name in NULLABLE:
        return
    if found not in (wanted, wanted.replace("numbers", "whole numbers")):
        raise DataError(f"{path}: {name} holds {found}: it must hold {wanted}: write it again")
    if column.null_count and name not in NULLABLE:
        row = pc.index(pc.is_null(column), True).as_py()
        raise DataError(f"{_row(path, row)}: {name} is null: fill it, or remove the row")
    if found.startswith("lists") and (values := column.flatten()).null_count:
        row = pc.list_parent_indices(column)[pc.index(pc.is_null(values), True).as_py()].as_py()
        raise DataError(f"{_row(path, row)}: {name} has a null: fill it, or remove the row")


def _check_ids(path: str | Path, rows: pa.Table) -> None:
    ids = batch.column(rows, "id")
    _, first = np.unique(ids, return_index=True)
    if len(first) < len(ids):
        again = np.setdiff1d(np.arange(len(ids)), first)[0]
        raise DataError(
            f"{_row(path, again)}: repeats an id, {ids[again]}: number the rows anew (the ids of every dumped batch "
            "begin at 0)"
        )


def _check_tokens(path: str | Path, rows: pa.Table, name: str, limits: Limits | None) -> None:
    what = name.removesuffix("_ids")
    if (empty := np.flatnonzero(batch.lengths(rows, name) == 0)).size:
        raise DataError(f"{_row(path, empty[0])}: the {what} is empty: remove the row")
    tokens = batch.flat(rows, name)
    strange = tokens < 0 if limits is None else (tokens < 0) | (tokens >= limits.vocabulary)
    if strange.any():
        at = int(strange.argmax())
        size = "" if limits is None else f" of {limits.vocabulary} tokens"
        raise DataError(
            f"{_row(path, _owner(rows, name, at))}: token {tokens[at]} of the {what} is not in the vocabulary{size}: "
            "give rows of the actor's own tokenizer"
        )


def _check_logprobs(path: str | Path, rows: pa.Table) -> None:
    name = "rollout_logprobs"
    if (wrong := np.flatnonzero(batch.lengths(rows, name) != batch.lengths(rows, "response_ids"))).size:
        raise DataError(
            f"{_row(path, wrong[0])}: {name} has not a number for each token of the response: write it again"
        )
    values = batch.flat(rows, name)
    strange = ~(np.isfinite(values) & (values <= ROUNDING))
    if strange.any():
        at = int(strange.argmax())
        raise DataError(
            f"{_row(path, _owner(rows, name, at))}: {name} has {values[at]}, which is no log-probability: it must be a "
            "number of at most 0; remove the row, or let megappo score make the column"
        )


def _check_mask(path: str | Path, rows: pa.Table) -> None:
    found = rows[LOSS_MASK].combine_chunks()
    if family(found.type) not in ("lists of bool", "lists of whole numbers", "lists of numbers"):
        raise DataError(
            f"{path}: {LOSS_MASK} holds {family(found.type)}: it must hold lists of 0 and 1: write it again"
        )
    if found.null_count or found.flatten().null_count:
        raise DataError(f"{path}: {LOSS_MASK} has a null: fill it with 0 or 1")
    try:
        flat_mask(rows, "response_ids")
    except LossMaskError as error:
        raise DataError(f"{path}: {error}") from None


def _owner(rows: pa.Table, name: str, at: int) -> int:
    """The row that has the value at a place of a ragged column's flat values."""
    return int(np.searchsorted(np.cumsum(batch.lengths(rows, name)), at, side="right"))
