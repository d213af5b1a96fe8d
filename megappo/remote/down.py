"""A run comes down from its URL: the newest checkpoint that is complete there, and its logs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from megappo.checkpoints import PARTIAL, Checkpoints, sync_tree
from megappo.config.run import working_folder
from megappo.remote.folder import CHECKPOINTS, OWNER_NAME, RemoteError, RemoteFolder, complete_steps
from megappo.run_lock import RunInUse, RunLock

STAYS = ("checkpoints/", "rollouts/", "logs/", "launch/")
"""What going on does not need."""


def bring_down(remote: RemoteFolder, checkpoints: Checkpoints, say: Callable[[str], None]) -> bool:
    """Make a run's folder here that of its URL, if the newest checkpoint is there; returns whether it was."""
    files = remote.files()
    here, there = checkpoints.complete(), complete_steps(files)
    if not there or (here and here[-1] >= there[-1]):
        return False
    name = f"step_{there[-1]}"
    below = f"{CHECKPOINTS}/{name}/"
    wanted = [file for file in files if file.startswith(below)]
    size = sum(files[file] for file in wanted)
    say(f"the checkpoint of step {there[-1]} ({size / 1e9:.1f} GB) comes down from {remote.url}")
    remote.get(_records(files), checkpoints.folder.parent)
    partial = checkpoints.folder / (name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    remote.get(wanted, partial, below)
    sync_tree(partial)
    partial.rename(checkpoints.folder / name)
    return True


def local_folder(run: str, say: Callable[[str], None], *, with_checkpoint: bool = False) -> Path:
    """The folder here of a run at a URL. What is there comes down, unless a run works here and has it.

    Raises:
        RemoteError: it cannot be read, or has no complete checkpoint where one is asked for.
    """
    folder = working_folder(run)
    try:
        lock = RunLock(folder)
    except RunInUse:
        return folder
    try:
        remote, checkpoints = RemoteFolder(run), Checkpoints(folder / CHECKPOINTS, keep=1)
        if with_checkpoint:
            bring_down(remote, checkpoints, say)
        elif not (folder / CHECKPOINTS).is_dir():
            remote.get(_records(remote.files()), folder)
    except Exception as error:
        raise RemoteError(f"{run}: cannot be read ({type(error).__name__}: {error})") from error
    finally:
        lock.release()
    if with_checkpoint and not checkpoints.complete():
        raise RemoteError(f"{run}: there is no complete checkpoint")
    return folder


def _records(files: dict[str, int]) -> list[str]:
    return [name for name in files if not name.startswith(STAYS) and not name.endswith((OWNER_NAME, PARTIAL))]
