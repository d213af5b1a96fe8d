"""A folder that appears whole or not at all, and knows what it was made from."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from megappo.checkpoints import PARTIAL, sync_tree
from megappo.config.run import is_url
from megappo.file_lock import NoFileLocks, lock
from megappo.models.spec import ModelError

RECORD = ".megappo-convert.json"
LOCK = ".lock"
GONE = ".gone"
"""In a folder that is being removed."""
MADE = "made"
"""In the record: the sizes of the files."""
MODEL = (RECORD, "config.json", "adapter_config.json", ".metadata")
"""One of these is in a folder that may be overwritten."""


def destination_folder(path: str | Path) -> Path:
    """The folder that is meant, itself where a link leads to it.

    Raises:
        ModelError: a URL, the current directory, or no path at all.
    """
    if is_url(str(path)):
        raise ModelError([f"{path}: is a URL: give a folder here as DST, and copy it there"])
    folder = Path(path)
    try:
        resolved = folder.resolve()
        if folder.is_symlink() or folder.name in ("", ".."):
            folder = resolved
        is_here = folder.exists() and folder.samefile(".")
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError([f"{path}: cannot be a folder ({error}): choose another DST"]) from None
    if not folder.name:
        raise ModelError([f"{path}: is the root of all folders: name a folder in it"])
    if folder.name.endswith(PARTIAL):
        raise ModelError([f"{path}: ends in {PARTIAL}, as what is not finished does: choose another DST"])
    if is_here:
        raise ModelError([f"{path}: is the current directory: name a folder in it"])
    return folder


def is_made(folder: Path, record: Mapping[str, Any]) -> bool:
    """Whether the folder is there already, made from the very same, with all of its files as long as they were."""
    try:
        found = json.loads((folder / RECORD).read_text())
        return bool(found.pop(MADE) == _sizes(folder) and found == record)
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return False


def _sizes(folder: Path) -> dict[str, int]:
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name not in (RECORD, LOCK)]
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(paths)}


def check_destination(folder: Path, *, overwrite: bool, needed_bytes: int) -> None:
    """Refuse what would fail, or destroy something, later.

    Raises:
        ModelError: the folder is in the way, or cannot be made, or its disk is too small.
    """
    parent = next(parent for parent in folder.absolute().parents if parent.exists())
    if not parent.is_dir():
        raise ModelError([f"{folder}: {parent} is a file: choose another DST"])
    if folder.exists() and not folder.is_dir():
        raise ModelError([f"{folder}: is a file: choose another DST"])
    if folder.is_dir() and not _is_empty(folder):
        if not overwrite:
            raise ModelError(
                [
                    f"{folder}: is there already, made from something else or changed since: "
                    "choose another DST, or --overwrite"
                ]
            )
        if not any((folder / name).is_file() for name in MODEL):
            raise ModelError([f"{folder}: is no model, so it is not overwritten: remove it, or choose another DST"])
    if folder.is_mount():
        raise ModelError([f"{folder}: is where a disk is mounted, so nothing can take its place: name a folder in it"])
    for path, ours in ((_partial(folder), (LOCK, RECORD)), (_replaced(folder), (*MODEL, GONE))):
        taken = path.is_symlink() or path.exists()
        known = path.is_dir() and (_is_empty(path) or any((path / name).exists() for name in ours))
        if taken and (path.is_symlink() or not known):
            raise ModelError([f"{path}: is in the way, and not from a conversion: rename it, or choose another DST"])
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ModelError([f"{folder}: {parent} is not writable: choose another DST, or change its permissions"])
    leftovers = [_partial(folder), *([_replaced(folder)] if folder.exists() else [])]
    files = (path for leftover in leftovers for path in leftover.rglob("*") if path.is_file())
    free = shutil.disk_usage(parent).free + sum(path.stat().st_blocks * 512 for path in files)
    if free < needed_bytes:
        raise ModelError(
            [f"{folder}: needs {needed_bytes / 1e9:.3g} GB, its disk has {free / 1e9:.3g} GB free: make room"]
        )


@contextmanager
def writing(folder: Path, record: Mapping[str, Any]) -> Iterator[Path]:
    """An empty folder to write into, which takes the place of ``folder`` if nothing is raised.

    What a killed conversion left is removed first, or put back; one that is still running is not disturbed.

    Raises:
        ModelError: another process is writing it, or nothing can keep one from it.
    """
    partial, replaced = _partial(folder), _replaced(folder)
    with _locked(partial) as held:
        _empty(partial, but=LOCK)
        _settle(folder)
        try:
            yield partial
            (partial / RECORD).write_text(json.dumps({**record, MADE: _sizes(partial)}, indent=1))
            sync_tree(partial)
            if folder.is_dir():
                folder.rename(replaced)
            partial.rename(folder)
        except BaseException:
            if not folder.exists():  # interrupted between the two
                _settle(folder)
            if _is_at(held, partial / LOCK):
                _unlock(partial)
            raise
        # The lock came along and is held till here, so that nobody could begin in a folder that was about to move.
        (folder / LOCK).unlink(missing_ok=True)
        _remove(replaced)


def tidy(folder: Path) -> None:
    """Remove what a conversion that was killed right after its end had yet to remove, unless another is at it."""
    partial, replaced = _partial(folder), _replaced(folder)
    if not any((replaced / name).exists() for name in (*MODEL, GONE)) or partial.exists():
        return
    with suppress(ModelError, OSError), _locked(partial):
        _settle(folder)
        _unlock(partial)


@contextmanager
def _locked(partial: Path) -> Iterator[IO[str]]:
    """The lock on a folder, which is made. Processes that share the work inherit it: it is held until all have ended.

    Raises:
        ModelError: another process has it, or the file system has no locks.
    """
    partial.mkdir(parents=True, exist_ok=True)
    with (partial / LOCK).open("w") as file:
        try:
            ours = lock(file) and _is_at(file, partial / LOCK)  # if not, the other was done between our two calls
        except NoFileLocks as error:
            if [path.name for path in partial.iterdir()] == [LOCK]:  # made just now
                _unlock(partial)
            raise ModelError([f"{partial}: {error}"]) from None
        if not ours:
            raise ModelError([f"{partial}: another process is writing it: wait for its end"])
        yield file


def _unlock(partial: Path) -> None:
    """Remove a folder whose lock is ours."""
    _empty(partial, but=LOCK)
    (partial / LOCK).unlink()
    partial.rmdir()


def _settle(folder: Path) -> None:
    """Put back what was to be replaced, or remove it where something is in its place, or where that had begun."""
    replaced = _replaced(folder)
    if replaced.is_dir() and not folder.exists() and not (replaced / GONE).exists():
        replaced.rename(folder)
    else:
        _remove(replaced)


def _remove(replaced: Path) -> None:
    """Remove it, if it is there, so that it cannot be put back once that has begun."""
    if replaced.is_dir():
        (replaced / GONE).touch()
        _empty(replaced, but=GONE)
        (replaced / GONE).unlink()
        replaced.rmdir()


def places(folder: Path) -> tuple[Path, ...]:
    """All that is written and removed for the sake of a destination."""
    return folder, _partial(folder), _replaced(folder)


def _is_empty(folder: Path) -> bool:
    return not any(folder.iterdir())


def _partial(folder: Path) -> Path:
    """Where it is written."""
    return folder.with_name(folder.name + PARTIAL)


def _replaced(folder: Path) -> Path:
    """Where the one before is put while another takes its place; no other destination is written there."""
    return folder.with_name(f"{folder.name}{PARTIAL}.old")


def _is_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _empty(folder: Path, *, but: str) -> None:
    for path in folder.iterdir():
        if path.name != but:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
