"""Rows of one published file, in whatever format, a batch at a time; every way to be unreadable gets a name."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from megappo.data.prompts import DataError
from megappo.data.published.files import data_format

BATCH_ROWS = 2048  # rows as Python objects at once
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
AGAIN = "download or write it again"


def read_rows(path: Path, required: Sequence[str], optional: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file as dicts of the `required` and `optional` columns; an absent one is None.

    Parquet, Arrow (stream or file) and JSON lines are read in batches; a `.json` file that is one list is read whole.

    Raises:
        DataError: a file that is empty, truncated, damaged, not readable, a Git LFS pointer, or lacks a required
            column (JSON: in its first row).
    """
    rows = 0
    try:
        with path.open("rb") as file:
            head = file.read(64)
        if not head:
            raise DataError(f"{path}: is empty (0 bytes): {AGAIN}")
        if head.startswith(b"version https://git-lfs"):
            raise DataError(f"{path}: is a Git LFS pointer, not the data: run git lfs pull in its repository")
        wanted = (*required, *optional)
        read = {"parquet": _parquet, "arrow": _arrow, "json": _json}[data_format(path) or "json"]
        for present, row in read(path, wanted):
            if rows == 0 or present is not None:
                _check_columns(path, required, row if present is None else present)
            if row is not None:
                yield {name: row.get(name) for name in wanted}
                rows += 1
    except json.JSONDecodeError as error:
        raise DataError(f"{path}: after {rows:,} rows: {error}: it is truncated or no JSON: {AGAIN}") from error
    except (pa.ArrowException, EOFError, zlib.error, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
        reason = str(error).splitlines()[0]
        raise DataError(f"{path}: is truncated or damaged after {rows:,} rows ({reason}): {AGAIN}") from error
    if rows == 0:
        raise DataError(f"{path}: has no rows: {AGAIN}")


# Each reader yields (columns of the file or None, row or None): the columns once, where the format has a schema.
Rows = Iterator[tuple[Sequence[str] | None, dict[str, Any] | None]]


def _parquet(path: Path, wanted: Sequence[str]) -> Rows:
    with pq.ParquetFile(path) as file:
        present = file.schema_arrow.names
        yield present, None
        for batch in file.iter_batches(BATCH_ROWS, columns=[name for name in wanted if name in present]):
            yield from ((None, row) for row in batch.to_pylist())


def _arrow(path: Path, wanted: Sequence[str]) -> Rows:
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(pa.memory_map(str(path)))
        size = source.size()
        if source.read(6) == b"ARROW1":
            file = stack.enter_context(pa.ipc.open_file(source))
            schema, batches = file.schema, (file.get_batch(i) for i in range(file.num_record_batches))
        else:
            # A stream that was cut between two batches looks as if it ended there, but for the mark.
            source.seek(max(0, size - len(END_OF_STREAM)))
            if source.read() != END_OF_STREAM:
                raise EOFError("its end mark is missing")
            source.seek(0)
            stream = stack.enter_context(pa.ipc.open_stream(source))
            schema, batches = stream.schema, iter(stream)
        yield schema.names, None
        names = [name for name in wanted if name in schema.names]
        for batch in batches:
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield from ((None, row) for row in batch.select(names).slice(start, BATCH_ROWS).to_pylist())


def _json(path: Path, wanted: Sequence[str]) -> Rows:
    with _open(path) as file:
        first = True
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                if not first:
                    error.args = (f"line {number}: {error.msg}",)
                    raise
                value = json.loads(line + file.read())  # one value over several lines
            for row in value if first and isinstance(value, list) else [value]:
                if not isinstance(row, dict):
                    raise DataError(f"{path}: line {number}: is {str(row)[:40]!r}: every row must be a JSON object")
                yield None, row
            first = False


@contextlib.contextmanager
def _open(path: Path) -> Iterator[IO[str]]:
    """A text file, gzipped or not, whatever its name says."""
    with path.open("rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        content: Any = gzip.GzipFile(fileobj=file) if zipped else file
        yield io.TextIOWrapper(content, "utf-8-sig")


def _check_columns(path: Path, required: Sequence[str], present: Any) -> None:
    missing = [name for name in required if name not in present]
    if not missing:
        return
    if {"data_source", "reward_model"} <= set(present):
        fix = "it is in the columns of prompt files already: name it in data.train as it is"
    else:
        fix = "give the data set's own files, or rename the columns"
        if len(missing) < len(required):
            fix = f"it needs {', '.join(required)}: {fix}"
    raise DataError(f"{path}: has no column {', '.join(missing)}; it has {', '.join(present) or 'none'}; {fix}")
