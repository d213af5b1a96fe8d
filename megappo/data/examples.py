"""Given responses to train on: pairs (``prompt, chosen, rejected``, perhaps ``margin``) or text (``prompt, response``).

Prompts are chat messages or plain strings, as for PPO. A response is tokenized as it is, and an end-of-text token put
after it, so that a model sees what it will see, or is to write, in PPO.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from megappo.data import batch
from megappo.data.fingerprint import fingerprint
from megappo.data.prompts import DataError, read_rows, tokenize_prompts
from megappo.data.sequences import ending_rows
from megappo.ppo.balance import unit_rows


@dataclass(frozen=True)
class Examples:
    """Tokenized examples.

    Attributes:
        table: the rows of all examples, ``unit`` rows each: ``id`` int64 (the row's own position), ``prompt_ids``,
            ``response_ids`` and, of pairs, ``margin`` (ragged float32, one a row).
        unit: 2 of pairs, the chosen side first; 1 of responses.
        report: says for people what was read, one line a file.
        fingerprint: of the examples as they are in their files.
    """

    table: pa.Table
    unit: int
    report: str
    fingerprint: str

    def __len__(self) -> int:
        return self.table.num_rows // self.unit

    def rows(self, examples: np.ndarray) -> pa.Table:
        """The rows of some examples, int64 [n], in that order, with ids of their own."""
        taken = self.table.take(pa.array(unit_rows(examples, self.unit))).combine_chunks()
        return taken.set_column(0, "id", pa.array(np.arange(taken.num_rows), pa.int64()))


def load_pairs(files: Sequence[str | Path], tokenizer: Any, *, max_tokens: int) -> Examples:
    """Read pairs.

    Raises:
        DataError: naming file and row: a pair whose sides are equal or one of them empty, or a margin that is no
            number in float32; a file that cannot be used; nothing left.
    """

    def make(where: str, row: dict[str, Any], prompt: list[int]) -> tuple[list[list[int]], float]:
        chosen, rejected = (response_tokens(where, row, name, tokenizer) for name in ("chosen", "rejected"))
        if chosen == rejected:
            raise DataError(f"{where}: chosen and rejected are equal: remove the row")
        return [prompt + chosen, prompt + rejected], _margin(where, row.get("margin"))

    kept, report, mark = _load(files, tokenizer, ("prompt", "chosen", "rejected"), ("margin",), max_tokens, make)
    sides = [np.array(side, np.int32) for pair, _ in kept for side in pair]
    margins = np.repeat(np.array([margin for _, margin in kept], np.float32), 2)
    table = ending_rows(np.arange(len(sides)), sides)
    table = table.append_column("margin", batch.ragged(margins, np.ones(len(sides), np.int64)))
    return Examples(table, 2, report, mark)


def load_responses(files: Sequence[str | Path], tokenizer: Any, *, max_tokens: int) -> Examples:
    """Read responses to imitate.

    Raises:
        DataError: naming file and row: an empty response; a file that cannot be used; nothing left.
    """

    def make(where: str, row: dict[str, Any], prompt: list[int]) -> tuple[list[list[int]], list[int]]:
        response = response_tokens(where, row, "response", tokenizer)
        return [prompt + response], prompt

    kept, report, mark = _load(files, tokenizer, ("prompt", "response"), (), max_tokens, make)
    table = pa.table(
        {
            "id": pa.array(np.arange(len(kept)), pa.int64()),
            "prompt_ids": pa.array([prompt for _, prompt in kept], pa.list_(pa.int32())),
            "response_ids": pa.array([whole[0][len(prompt) :] for whole, prompt in kept], pa.list_(pa.int32())),
        }
    )
    return Examples(table, 1, report, mark)


def _load(
    files: Sequence[str | Path],
    tokenizer: Any,
    required: Sequence[str],
    optional: Sequence[str],
    max_tokens: int,
    make: Callable[[str, dict[str, Any], list[int]], tuple[list[list[int]], Any]],
) -> tuple[list[tuple[list[list[int]], Any]], str, str]:
    """What ``make`` gives for every row whose sequences are short enough, a report, and a fingerprint of these rows."""
    kept: list[tuple[list[list[int]], Any]] = []
    texts, report = [], []
    if tokenizer.eos_token_id is None:
        raise DataError(f"{tokenizer.name_or_path}: its tokenizer has no end-of-text token: give eos_token there")
    for path in map(Path, files):
        total = over = 0
        for first, rows in read_rows(path, required, optional):
            _, prompts = tokenize_prompts(path, first, [row["prompt"] for row in rows], tokenizer)
            for offset, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
                where = f"{path}, row {first + offset} (counting from 0)"
                if not prompt:
                    raise DataError(f"{where}: the prompt is empty: remove the row")
                made = make(where, row, prompt)
                if max(map(len, made[0])) > max_tokens:
                    over += 1
                else:
                    kept.append(made)
                    texts.append(json.dumps(row, sort_keys=True, default=str))
            total += len(rows)
        if total == 0:
            raise DataError(f"{path}: no rows: name a file with at least one")
        report.append(f"{path}: {total:,} rows, {over:,} over {max_tokens:,} tokens left out")
    if not kept:
        raise DataError(f"all rows of {', '.join(map(str, files))} are over data.max_tokens, {max_tokens:,}: raise it")
    return kept, "\n".join(report), fingerprint(texts)


def response_tokens(where: str, row: dict[str, Any], column: str, tokenizer: Any) -> list[int]:
    """A response's token ids, the end-of-text token after them.

    Raises:
        DataError: it is empty, no string, or has no token but that one.
    """
    text = row[column]
    if not isinstance(text, str):
        raise DataError(f"{where}: {column} is {str(text)[:80]!r}: it must be a string, the response alone")
    if not text.strip():
        raise DataError(f"{where}: {column} is empty: remove the row")
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if not tokens:
        raise DataError(f"{where}: {column} is {text[:80]!r}, of which the tokenizer knows nothing: remove the row")
    return [*tokens, tokenizer.eos_token_id]


def _margin(where: str, value: Any) -> float:
    if value is None:  # there is no such column, or nothing in it
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"{where}: margin is {value!r}: it must be a number")
    with np.errstate(over="ignore"):
        margin = np.float32(value)
    if not np.isfinite(margin):
        raise DataError(f"{where}: margin is {value!r}: it must be a number, and within float32")
    return float(margin)
