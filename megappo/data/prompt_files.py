"""Prompt files, looked at from outside: their footers, and where it matters one column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megappo.config import DataConfig

COLUMNS = ("data_source", "prompt", "reward_model")
"""The columns of verl's prompt files that a run needs; ``ability`` and ``extra_info`` may be absent."""


@dataclass(frozen=True)
class PromptFile:
    """What a prompt file's footer says: how many rows, and its Arrow schema, and whether prompts are chat messages."""

    rows: int
    schema: Any
    chat: bool


def read_prompt_file(path: Path) -> PromptFile:
    """Read the footer of a prompt file.

    Raises:
        ValueError: the file is missing, truncated, empty, or lacks a column.
    """
    import pyarrow as pa

    file = read_columns(path, COLUMNS)
    truth = file.schema.field("reward_model").type
    if not pa.types.is_struct(truth) or truth.get_field_index("ground_truth") < 0:
        raise ValueError(f"{path}: reward_model is {truth}: it must be a struct with ground_truth")
    return file


def read_columns(path: Path, columns: Sequence[str]) -> PromptFile:
    """Read the footer of a parquet file that must have these columns, ``prompt`` among them.

    Raises:
        ValueError: the file is missing, truncated, empty, lacks a column or has one twice.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.exists():
        raise ValueError(f"{path}: no such file: give the path of a parquet file")
    if not path.is_file():
        raise ValueError(f"{path}: is a folder: name the parquet files in it")
    try:
        with pq.ParquetFile(path) as file:
            schema, rows = file.schema_arrow, file.metadata.num_rows
    except (pa.ArrowException, OSError):
        raise ValueError(f"{path}: {_no_parquet(path)}") from None
    missing = [name for name in columns if name not in schema.names]
    if missing:
        raise ValueError(
            f"{path}: has no column {', '.join(missing)}: it has {', '.join(schema.names) or 'none'}, "
            f"and needs {', '.join(columns)}"
        )
    if twice := sorted({name for name in schema.names if schema.names.count(name) > 1}):
        raise ValueError(f"{path}: has {', '.join(twice)} twice: keep one column of each name")
    if rows == 0:
        raise ValueError(f"{path}: has no rows: give a file with at least one prompt")
    prompt = schema.field("prompt").type
    return PromptFile(rows, schema, chat=pa.types.is_list(prompt) or pa.types.is_large_list(prompt))


def _no_parquet(path: Path) -> str:
    """What a file that is no whole parquet file is instead, and what to do."""
    try:
        with path.open("rb") as file:
            head = file.read(64).lstrip()
    except OSError as error:
        return f"cannot be read ({error.strerror}): change its permissions"
    if not head.startswith((b"{", b"[")):
        return "is truncated or no parquet file: write it again"
    rows = f"map(json.loads, open('{path.name}'))" if head.startswith(b"{") else f"json.load(open('{path.name}'))"
    return (
        "is JSON, not parquet: write it with "
        f"pyarrow.parquet.write_table(pyarrow.Table.from_pylist([*{rows}]), '{path.stem}.parquet')"
    )


def rows_in(path: Path) -> int:
    """Rows of a prompt file; 0 if it cannot be used."""
    try:
        return read_prompt_file(path).rows
    except ValueError:
        return 0


def watched_prompts(data: DataConfig) -> int:
    """The most prompts that are generated for at once besides a step's: those of the validation, or of the canary."""
    validation, canary = (sum(rows_in(Path(path)) for path in paths) for paths in (data.validation, data.canary))
    return max(min(validation, data.validation_prompts or validation), canary)


def data_sources(path: Path) -> set[str]:
    """The values of a prompt file's ``data_source`` column; none if the file cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return set(pq.read_table(path, columns=["data_source"])["data_source"].unique().to_pylist())
    except (pa.ArrowException, OSError, KeyError):
        return set()
