"""Which files a published data set consists of, and which split each belongs to, by the names that hubs give them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megappo.data.prompts import DataError

FORMATS = {".parquet": "parquet", ".arrow": "arrow", ".jsonl": "json", ".ndjson": "json", ".json": "json"}
DESCRIPTIONS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "package.json"}
NAMED = 4  # files named of those left out
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    "test": "test",
}


@dataclass(frozen=True)
class Source:
    """The files of each split ("train", "validation", "test"), in order, and those that were left out, and why."""

    splits: dict[str, tuple[Path, ...]]
    notes: tuple[str, ...]


def data_format(path: Path) -> str | None:
    """`parquet`, `arrow` or `json` (JSON lines too, gzipped or not) by a file's name; None for any other."""
    return FORMATS.get(Path(path.name.removesuffix(".gz")).suffix)


def find_files(src: Path, skip: Sequence[str] = ()) -> Source:
    """Find the data files of `src`: a file, a hub's folder at any depth, or what `datasets` saved with `save_to_disk`.

    The split of a file is told by its name or, failing that, by the folders above it (`hellaswag_val.jsonl`,
    `main/train-00000-of-00001.parquet`, `train/algebra/1.json`). Where no file tells, all are "train".

    Args:
        skip: words in a path below `src` that mark another data set of the same folder (gsm8k's `socratic`); those
            files are left out while there are any others.

    Raises:
        DataError: nothing there, no data files, a saved folder that lacks files, one split in two formats.
    """
    if not src.exists():
        raise DataError(f"{src}: no such file or folder: give the data set's files as they were downloaded")
    if src.is_file():
        if data_format(src) is None:
            raise DataError(
                f"{src}: is no data file by its name: known are {', '.join(FORMATS)} and .gz of the JSON ones"
            )
        return Source({_split_of(src.name) or "train": (src,)}, ())
    files = sorted(_walk(src), key=lambda file: _natural(file[0].relative_to(src).as_posix()))
    if not files:
        present = sorted(path.name for path in src.iterdir())
        raise DataError(
            f"{src}: has no data files ({', '.join(FORMATS)}); it has {', '.join(present[:8]) or 'nothing'}: "
            "give the folder that holds them"
        )
    notes = []
    others = {path for path, _ in files if any(word in path.relative_to(src).as_posix() for word in skip)}
    if 0 < len(others) < len(files):
        notes.append(_left_out([path for path, _ in files if path in others], "give one as SRC to use it instead"))
        files = [file for file in files if file[0] not in others]
    if any(split for _, split in files) and not all(split for _, split in files):
        notes.append(_left_out([path for path, split in files if not split], "no name or folder tells their split"))
        files = [file for file in files if file[1]]
    splits: dict[str, list[Path]] = {}
    for path, split in files:
        splits.setdefault(split or "train", []).append(path)
    for split, paths in splits.items():
        first_of = {data_format(path): path for path in reversed(paths)}
        if len(first_of) > 1:
            raise DataError(
                f"{src}: split {split} is there more than once, as {' and '.join(map(str, first_of.values()))}: "
                "give one of them, or the folder that has only one"
            )
    return Source({split: tuple(paths) for split, paths in splits.items()}, tuple(notes))


def _walk(folder: Path, above: str | None = None) -> Iterator[tuple[Path, str | None]]:
    """Data files below a folder, each with its split; hidden folders (`.git`) and descriptions are no data."""
    names = sorted(os.listdir(folder))
    if "state.json" in names:
        yield from _saved(folder, above)
        return
    if "dataset_dict.json" in names:
        splits = _load(folder / "dataset_dict.json").get("splits", [])
        missing = [name for name in splits if not (folder / name / "state.json").is_file()]
        if missing:
            raise DataError(f"{folder}: lacks split {', '.join(missing)}, which dataset_dict.json names: save it again")
    for name in names:
        path = folder / name
        if name.startswith(".") or name in DESCRIPTIONS:
            continue
        if path.is_dir():
            yield from _walk(path, _split_of(name) or above)
        elif data_format(path):
            yield path, _split_of(name) or above


def _saved(folder: Path, above: str | None) -> Iterator[tuple[Path, str | None]]:
    """The files of one split as `Dataset.save_to_disk` writes it: state.json lists them in order."""
    state = _load(folder / "state.json")
    try:
        names = [entry["filename"] for entry in state["_data_files"]]
    except (KeyError, TypeError):
        raise DataError(f"{folder / 'state.json'}: does not list _data_files: save the data set again") from None
    if state.get("_indices_data_files"):
        raise DataError(
            f"{folder}: has a selection of rows beside the rows (_indices_data_files): "
            "load it, call flatten_indices() and save it again"
        )
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise DataError(f"{folder}: lacks {', '.join(missing)}, which state.json names: save or copy it again")
    for name in names:
        yield folder / name, above or _split_of(str(state.get("_split") or ""))


def _load(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}): save or copy it again") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: is no JSON object: save or copy it again")
    return value


def _left_out(paths: list[Path], why: str) -> str:
    more = f" and {len(paths) - NAMED:,} more" if len(paths) > NAMED else ""
    return f"left out {', '.join(map(str, paths[:NAMED]))}{more}: {why}"


def _split_of(name: str) -> str | None:
    words = re.split(r"[^a-z]+", name.lower())
    return next((SPLITS[word] for word in words if word in SPLITS), None)


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key that puts 2.json before 10.json."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", name)]
