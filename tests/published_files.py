"""Rows in the schemas of the published data sets, and the formats that they come in."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Rows = Sequence[dict[str, Any]]


def gsm8k_rows(count: int, start: int = 0) -> list[dict[str, Any]]:
    """Their answers are 1,000 and twice the number of the row."""
    rows = []
    for i in range(start, start + count):
        more, total = i + 1000, 2 * i + 1000
        answer = f"She has {i} + {more} = <<{i}+{more}={total}>>{total}.\n#### {total:,}"
        rows.append({"question": f"Ann has {i} pens and buys {more}. How many has she?", "answer": answer})
    return rows


def math_row(answer: str = r"\boxed{\frac{1}{2}}", number: int = 0) -> dict[str, Any]:
    return {
        "problem": rf"Compute $\frac{{{number + 1}}}{{{2 * number + 2}}}$.",
        "level": "Level 1",
        "type": "Prealgebra",
        "solution": rf"Not $\boxed{{3}}$, but ${answer}$.",
    }


def hellaswag_row(**changes: Any) -> dict[str, Any]:
    return {
        "ind": 4,
        "activity_label": "Removing ice from car",
        "ctx_a": "Then, the man writes over the snow covering the window of a car.",
        "ctx_b": "then",
        "ctx": "Then, the man writes over the snow covering the window of a car. then",
        "endings": [", the man adds wax.", ", a person boards a ski lift.", ", he scrapes it.", ", the man stops."],
        "source_id": "activitynet~v_-1IBHYS3L-Y",
        "split": "train",
        "split_type": "indomain",
        "label": "2",
        **changes,
    }


def dialogue(*turns: str) -> str:
    """Turns of Human and Assistant, one after the other."""
    return "".join(f"\n\n{('Human', 'Assistant')[i % 2]}: {turn}" for i, turn in enumerate(turns))


def hh_rows(count: int) -> list[dict[str, Any]]:
    turns = [("Hello", "Hi!", f"What is {i}?") for i in range(count)]
    return [
        {"chosen": dialogue(*t, f"A number, {i}."), "rejected": dialogue(*t, "Go away.")} for i, t in enumerate(turns)
    ]


def write_parquet(path: Path, rows: Rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def write_lines(path: Path, rows: Rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def write_stream(path: Path, rows: Rows, batch: int = 3) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(list(rows))
    with path.open("wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)
    return path


def save_to_disk(folder: Path, split: str | None, *shards: Rows) -> Path:
    """What `datasets.Dataset.save_to_disk` leaves: Arrow streams, state.json and dataset_info.json."""
    names = [f"data-{i:05d}-of-{len(shards):05d}.arrow" for i in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        write_stream(folder / name, rows)
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": "0123456789abcdef",
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": split,
    }
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}, "splits": {}}))
    return folder


def read(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()
