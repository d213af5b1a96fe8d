"""From the published files of a data set to train.parquet and validation.parquet, a batch of rows at a time."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megappo.data.prompts import DataError
from megappo.data.published import INSTRUCTIONS
from megappo.data.published.dataset import Converted, Dataset, Unusable
from megappo.data.published.files import Source, find_files
from megappo.data.published.rows import read_rows

BATCH_ROWS = 2048
SHARE, MOST = 20, 1000  # without a split to validate on: one question in 20, at most 1000
NAMED = 5  # rows named of those left out for one reason


@dataclass(frozen=True)
class Written:
    """The files that were written, with their rows, and what a user should know about rows and files left out."""

    rows: dict[Path, int]
    notes: tuple[str, ...]


def write_dataset(
    name: str,
    src: str | Path,
    out: str | Path,
    *,
    validation: int | None = None,
    seed: int | None = None,
    instruction: str | None = None,
) -> Written:
    """Write `train.parquet` and `validation.parquet` in verl's columns (hh-rlhf: in `prompts/`, `pairs/` and `sft/`).

    Validation is the published test split (hellaswag: validation, whose rows have labels). Where there is none, or
    `validation` says how many, questions are drawn from the training split by `seed`; rows with equal prompts stay
    together. Rows that cannot be used are left out, and are counted and named in the result's notes. Files appear
    when all of them are complete.

    Args:
        name: a key of `INSTRUCTIONS`.
        src: a file, or a folder of files (see `find_files`).
        validation: distinct questions to draw from the training split.
        seed: of that draw, where there is one; 0 unless given.
        instruction: text after each question (hh-rlhf: a system message); None: that of `INSTRUCTIONS`; "": none.

    Raises:
        DataError: files that cannot be read or lack a column, no usable row, too few questions to split.
        ValueError: an impossible option.
    """
    dataset: Dataset = importlib.import_module(f"{__package__}.{name.replace('-', '_')}").DATASET
    src, out = Path(src), Path(out)
    if validation is not None and validation < 1:
        raise ValueError(f"--validation: {validation}: give at least 1")
    if src.is_dir() and out.resolve().is_relative_to(src.resolve()):
        raise ValueError(f"{out}: is in the source folder {src}; write somewhere else")
    if src.resolve() in {path.resolve() for path in _output_paths(out, dataset.schemas)}:
        raise ValueError(f"{src}: would be overwritten; write to a folder other than {out}")
    reader = _Reader(dataset, INSTRUCTIONS[name] if instruction is None else instruction)
    source = find_files(src, dataset.skip)
    train, held_out = _choose_splits(source, dataset, src, drawn=validation is not None)
    if held_out and seed is not None:
        raise ValueError(
            f"--seed {seed}: nothing is drawn, as there is a {held_out} split: leave it out, or give --validation"
        )
    used = (train, held_out) if held_out else (train,)
    notes = [*source.notes, *(f"{split} split: not used" for split in source.splits if split not in used)]
    if not held_out and train != "train":
        notes.append(f"{src}: has a {train} split only, which is divided")
    drawn = set() if held_out else _draw(reader, source.splits[train], train, validation, seed or 0)

    with _Outputs(out, dataset.schemas) as outputs:
        for split in used:
            left_out = _LeftOut(split)
            for path, row, index, converted in reader.rows(source.splits[split]):
                for reason in converted.reasons:
                    left_out.add(reason, path, row)
                if not converted.rows:
                    continue
                apart = split == held_out or (bool(drawn) and _key(_main(converted)) in drawn)
                for folder, values in converted.rows.items():
                    values["extra_info"] |= {"split": split, "index": index}
                    outputs.add(folder, "validation" if apart else "train", values)
            left_out.total = index + 1
            notes += left_out.lines()
        outputs.check(notes)
    return Written(outputs.counts, tuple(notes))


def _choose_splits(source: Source, dataset: Dataset, src: Path, *, drawn: bool) -> tuple[str, str | None]:
    """The split to train on and the one to validate on, if there is one and none is to be drawn."""
    if len(source.splits) == 1:
        return next(iter(source.splits)), None
    if "train" not in source.splits:
        raise DataError(f"{src}: has no train split, but {', '.join(source.splits)}: give one of them as SRC")
    held_out = next(split for split in dataset.held_out if split in source.splits)
    return "train", None if drawn else held_out


@dataclass(frozen=True)
class _Reader:
    dataset: Dataset
    instruction: str

    def rows(self, paths: tuple[Path, ...]) -> Iterator[tuple[Path, int, int, Converted]]:
        """(file, row in the file, row in all files, what became of it), rows counted from 0."""
        index = 0
        for path in paths:
            for row, values in enumerate(read_rows(path, self.dataset.required, self.dataset.optional)):
                try:
                    converted = self.dataset.convert(values, self.instruction)
                except Unusable as reason:
                    converted = Converted({}, (f"left out: {reason}",))
                yield path, row, index, converted
                index += 1


def _draw(reader: _Reader, paths: tuple[Path, ...], split: str, wanted: int | None, seed: int) -> set[int]:
    """The keys of questions drawn for validation. Reads all files once: only 8 bytes a row are kept."""
    keys = array("Q", (_key(_main(converted)) for *_, converted in reader.rows(paths) if converted.rows))
    distinct = np.unique(np.frombuffer(keys, dtype=np.uint64)) if keys else np.zeros(0, np.uint64)
    if wanted is None:
        wanted = min(MOST, max(1, len(distinct) // SHARE))
    if 0 < len(distinct) <= wanted:
        place = paths[0] if len(paths) == 1 else paths[0].parent
        raise DataError(
            f"{place}: {wanted:,} questions wanted for validation, but the {split} split has "
            f"{len(distinct):,} distinct ones: ask for fewer (--validation), so that some are left to train on"
        )
    return set(np.random.default_rng(seed).permutation(distinct)[:wanted].tolist())


def _main(converted: Converted) -> dict[str, Any]:
    return next(iter(converted.rows.values()))


def _key(row: dict[str, Any]) -> int:
    """64 bits that stand for a prompt."""
    digest = hashlib.blake2b(json.dumps(row["prompt"]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@dataclass
class _LeftOut:
    split: str
    total: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    named: dict[str, dict[Path, list[int]]] = field(default_factory=dict)

    def add(self, reason: str, path: Path, row: int) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1
        if self.counts[reason] <= NAMED:
            self.named.setdefault(reason, {}).setdefault(path, []).append(row)

    def lines(self) -> Iterator[str]:
        for reason, count in self.counts.items():
            places = ", ".join(
                f"{path} row{'s' * (len(rows) > 1)} {', '.join(map(str, rows))}"
                for path, rows in self.named[reason].items()
            )
            more = f" and {count - NAMED:,} more" if count > NAMED else ""
            yield f"{self.split} split: {count:,} of {self.total:,} rows {reason} ({places}{more}; counting from 0)"


def _output_paths(out: Path, schemas: Mapping[str, pa.Schema]) -> dict[Path, pa.Schema]:
    parts = ("train.parquet", "validation.parquet")
    return {out / folder / part: schema for folder, schema in schemas.items() for part in parts}


class _Outputs:
    """The files being written; they get their names when the block ends well, and vanish when it does not."""

    def __init__(self, out: Path, schemas: Mapping[str, pa.Schema]) -> None:
        self.counts: dict[Path, int] = {}
        self._schemas = _output_paths(out, schemas)
        self._out = out
        self._writers: dict[Path, pq.ParquetWriter] = {}
        self._waiting: dict[Path, list[dict[str, Any]]] = {path: [] for path in self._schemas}

    def __enter__(self) -> _Outputs:
        for path, schema in self._schemas.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._writers[path] = pq.ParquetWriter(self._partial(path), schema)
            self.counts[path] = 0
        return self

    def add(self, folder: str, part: str, row: dict[str, Any]) -> None:
        path = self._out / folder / f"{part}.parquet"
        self._waiting[path].append(row)
        self.counts[path] += 1
        if len(self._waiting[path]) == BATCH_ROWS:
            self._flush(path)

    def check(self, notes: list[str]) -> None:
        """Raise DataError if a file has no rows."""
        empty = [str(path) for path, count in self.counts.items() if count == 0]
        if empty:
            raise DataError("\n".join([f"{', '.join(empty)}: no row is left for it, so nothing is written", *notes]))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for path, writer in self._writers.items():
            if kind is None:
                self._flush(path)
            writer.close()
        for path in self._writers:
            if kind is None:
                self._partial(path).replace(path)
            else:
                with contextlib.suppress(OSError):
                    self._partial(path).unlink()

    def _flush(self, path: Path) -> None:
        if self._waiting[path]:
            self._writers[path].write_table(pa.Table.from_pylist(self._waiting[path], schema=self._schemas[path]))
            self._waiting[path].clear()

    @staticmethod
    def _partial(path: Path) -> Path:
        return path.with_name(f".{path.name}.partial")
