"""A folder that appears whole or not at all, and knows what it was made from."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megappo.checkpoints import PARTIAL, sync_tree
from megappo.models.spec import ModelError

RECORD = ".megappo-convert.json"
LOCK = ".lock"

SYNC_FILE_RANGE_WRITE = 2


def is_made(folder: Path, record: Mapping[str, Any]) -> bool:
    """Whether the folder is there already, made from the very same."""
    try:
        return bool(json.loads((folder / RECORD).read_text()) == record)
    except (OSError, ValueError):
        return False


def check_destination(folder: Path, *, overwrite: bool, needed_bytes: int) -> None:
    """Refuse what would fail, or destroy something, later.

    Raises:
        ModelError: the folder is in the way, or cannot be made, or its disk is too small.
    """
    parent = next(parent for parent in folder.absolute().parents if parent.exists())
    if folder.exists() and not folder.is_dir():
        raise ModelError([f"{folder}: is a file: choose another DST"])
    if folder.is_dir() and any(folder.iterdir()):
        if not overwrite:
            raise ModelError(
                [f"{folder}: is there already, made from something else: choose another DST, or --overwrite"]
            )
        if not any((folder / name).is_file() for name in (RECORD, "config.json", "adapter_config.json", ".metadata")):
            raise ModelError([f"{folder}: is no model, so it is not overwritten: remove it, or choose another DST"])
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ModelError([f"{folder}: {parent} is not writable: choose another DST, or change its permissions"])
    partial = folder.with_name(folder.name + PARTIAL)
    leftover = sum(path.stat().st_blocks * 512 for path in partial.rglob("*") if path.is_file())
    free = shutil.disk_usage(parent).free + leftover
    if free < needed_bytes:
        raise ModelError(
            [f"{folder}: needs {needed_bytes / 1e9:.1f} GB, its disk has {free / 1e9:.1f} GB free: make room"]
        )


@contextmanager
def writing(folder: Path, record: Mapping[str, Any]) -> Iterator[Path]:
    """An empty folder to write into, which takes the place of ``folder`` if nothing is raised.

    What a killed conversion left is removed first; one that is still running is not disturbed.

    Raises:
        ModelError: another process is writing it.
    """
    partial = folder.with_name(folder.name + PARTIAL)
    partial.mkdir(parents=True, exist_ok=True)
    # Processes that share the work inherit the lock: it is held until the last of them has ended.
    with (partial / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ModelError([f"{partial}: another process is writing it: wait for its end"]) from None
        for path in partial.iterdir():
            if path.name != LOCK:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        try:
            yield partial
            (partial / RECORD).write_text(json.dumps(record, indent=1))
            (partial / LOCK).unlink()
            sync_tree(partial)
            if folder.is_dir():
                folder.rename(doomed := folder.with_name(f"{folder.name}.old{PARTIAL}"))
                partial.rename(folder)
                shutil.rmtree(doomed)
            else:
                partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def start_writing_back(folder: Path) -> None:
    """Have the kernel bring to disk what is in the folder's files by now, without waiting for it.

    By itself it would begin later, and the disk do nothing until then.
    """
    if (start := getattr(ctypes.CDLL(None), "sync_file_range", None)) is None:  # not on Linux
        return
    for path in folder.iterdir():
        if path.is_file():
            with path.open("rb") as file:
                start(file.fileno(), ctypes.c_int64(0), ctypes.c_int64(0), SYNC_FILE_RANGE_WRITE)
