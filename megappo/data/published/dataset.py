"""What one data set says about itself, for `write_dataset` to read, convert and write it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
ORIGIN = (("split", pa.string()), ("index", pa.int64()))
"""Fields of every `extra_info`: the published split, and the row's number in all of its files together."""


class Unusable(Exception):
    """A row, or what one set of files would have made of it, that has to be left out; its text is the reason."""


@dataclass(frozen=True)
class Converted:
    """What became of one published row: rows by set of files, and the reasons why a set gets none."""

    rows: Mapping[str, dict[str, Any]]
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Dataset:
    """One published data set.

    Attributes:
        required, optional: columns that are read.
        held_out: published splits that can serve for validation, the best first.
        skip: words in file names that mark another data set in the same folder.
        schemas: the columns of each set of files, by its folder below OUT; "" is OUT itself. Each has `extra_info`
            with at least the fields of `ORIGIN`, which `write_dataset` fills in. The first set is the main one: its
            `prompt` is what a split by chance keeps apart.
        convert: makes one published row (a dict of its columns) and an instruction into rows; may raise `Unusable`.
    """

    name: str
    required: tuple[str, ...]
    schemas: Mapping[str, pa.Schema]
    convert: Callable[[Mapping[str, Any], str], Converted]
    optional: tuple[str, ...] = ()
    held_out: tuple[str, ...] = ("test", "validation")
    skip: tuple[str, ...] = ()


def prompt_schema(*more: tuple[str, pa.DataType]) -> pa.Schema:
    """verl's columns, with `more` fields in `extra_info`."""
    return pa.schema(
        [
            ("data_source", pa.string()),
            ("prompt", MESSAGES),
            ("ability", pa.string()),
            ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
            ("extra_info", pa.struct([*ORIGIN, ("answer", pa.string()), ("question", pa.string()), *more])),
        ]
    )


def question(
    data_source: str, ability: str, prompt: str, instruction: str, ground_truth: str, **extra_info: Any
) -> Converted:
    """A prompt of one user message, for a rule to score. A blank, or a line break of its own, ends the question."""
    between = "" if prompt.endswith("\n") else " "
    content = f"{prompt}{between}{instruction}" if instruction else prompt
    row = {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": content}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": extra_info,
    }
    return Converted({"": row})


def text(row: Mapping[str, Any], column: str) -> str:
    """The text of a column.

    Raises:
        Unusable: it is null, blank or no text.
    """
    value = row[column]
    if value is None or value == "":
        raise Unusable(f"no {column}")
    if not isinstance(value, str):
        raise Unusable(f"{column} is no text but {type(value).__name__}")
    if not value.strip():
        raise Unusable(f"no {column}")
    return value
