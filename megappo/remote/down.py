"""A run comes down from its URL: the newest checkpoint that is whole there, and its records."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from megappo.check.remote_folder import overlap
from megappo.checkpoints import PARTIAL, STATE_NAME, UNVALIDATED, Checkpoints, sync_tree
from megappo.config.run import working_folder
from megappo.remote.folder import CHECKPOINTS, OWNER_NAME, RemoteError, RemoteFolder, complete_steps
from megappo.remote.uploads import SENT_NAME
from megappo.report.run_log import LOG_NAME, SAMPLES_NAME
from megappo.run_lock import RunInUse, RunLock

STAYS = ("checkpoints/", "rollouts/", "logs/", "launch/")
"""What going on does not need."""
REPLACED = ("rollouts", "tensorboard", LOG_NAME, SAMPLES_NAME, SENT_NAME)
"""What a run leaves here that is no longer true once its folder is that of the URL."""


def bring_down(
    remote: RemoteFolder, checkpoints: Checkpoints, say: Callable[[str], None], warn: Callable[[str], None]
) -> bool:
    """Make a run's folder here that of its URL, if the newest checkpoint is there; returns whether it was.

    Records here, which may be of steps that never were in the run, give way to those of the URL.

    Args:
        say: is told what comes down.
        warn: is told of checkpoints there that are not whole.

    Raises:
        RemoteError: the folder here is the URL's place, or holds another run; or no checkpoint there is whole.
        OSError: something could not be read, as the library below has it.
    """
    folder = checkpoints.folder.parent
    refuse_overlap(remote.url, folder)
    files, here = remote.files(), checkpoints.complete()
    newest = _newest_whole(remote, files, warn, needed=not here)
    if newest is None:
        return False
    parted = _parting(remote, checkpoints, newest)
    if parted is not None and here[-1] > newest:
        raise _other_run(remote.url, folder, parted)
    if here and (here[-1] > newest or (here[-1] == newest and parted is None)):
        return False
    name = f"step_{newest}"
    below = f"{CHECKPOINTS}/{name}/"
    wanted = [file for file in files if file.startswith(below)]
    size = sum(files[file] for file in wanted)
    say(f"the checkpoint of step {newest} ({size / 1e9:.1f} GB) comes down from {remote.url}")
    coming, records = (checkpoints.folder / f"{name}.{part}{PARTIAL}" for part in ("coming", "records"))
    for new in (coming, records):
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
    remote.get(wanted, coming, below)
    remote.get(_records(files), records)
    sync_tree(coming)
    for step in here:
        if step == newest or (parted is not None and step >= parted):
            checkpoints.remove(step)
    _replace_records(folder, records)
    shutil.rmtree(checkpoints.folder / name, ignore_errors=True)  # one that was emptied
    coming.rename(checkpoints.folder / name)
    return True


def local_folder(run: str, say: Callable[[str], None], *, with_checkpoint: bool = False) -> Path:
    """The folder here of a run at a URL. What is there comes down, unless a run works here or is further here.

    Raises:
        RemoteError: it cannot be read, has no run, or no complete checkpoint where one is asked for; or the folder here
            has another run.
    """
    folder = working_folder(run)
    checkpoints = Checkpoints(folder / CHECKPOINTS, keep=1)
    none = (
        "there is no complete checkpoint"
        if with_checkpoint
        else f"has no {LOG_NAME}: give the folder of a run (run.dir)"
    )
    try:
        refuse_overlap(run, folder)
        if not folder.is_dir():  # which a mistyped URL should not make
            files = RemoteFolder(run).files()
            if not (complete_steps(files) if with_checkpoint else LOG_NAME in files):
                raise RemoteError(f"{run}: {none}")
        lock = RunLock(folder)
        try:
            if with_checkpoint:
                bring_down(RemoteFolder(run), checkpoints, say, say)
            else:
                _bring_records(RemoteFolder(run), checkpoints)
        finally:
            lock.release()
    except RunInUse:
        return folder
    except RemoteError:
        raise
    except Exception as error:
        raise RemoteError(f"{run}: cannot be read ({type(error).__name__}: {error})") from error
    if with_checkpoint and not checkpoints.complete():
        raise RemoteError(f"{run}: {none}")
    return folder


def refuse_overlap(url: str, folder: Path) -> None:
    """Raises RemoteError if a working folder is the place of its URL, in it, or around it."""
    if problem := overlap(url, folder):
        raise RemoteError(f"run.dir: {problem}")


def first_difference(here: str, there: str, last: int) -> int | None:
    """First step, up to the last, of which two logs have other lines; None if there is none, or one log is empty."""
    ours, theirs = _lines(here), _lines(there)
    if not ours or not theirs:
        return None
    steps = sorted(step for step in ours.keys() | theirs.keys() if step <= last)
    return next((step for step in steps if ours.get(step) != theirs.get(step)), None)


def _lines(log: str) -> dict[int, str]:
    lines: dict[int, str] = {}
    for line in log.splitlines():
        try:
            lines[int(json.loads(line)["step"])] = line
        except (ValueError, TypeError, KeyError):  # a torn last line
            continue
    return lines


def _parting(remote: RemoteFolder, checkpoints: Checkpoints, newest: int) -> int | None:
    """The step from which the run here, if it has a checkpoint, is not that of the URL; None if it is the same.

    Lines of a log hold the time at which they were written, and are final once a checkpoint of their step is.

    Raises:
        RemoteError: not even the first step is the same.
    """
    here = checkpoints.complete()
    log = checkpoints.folder.parent / LOG_NAME
    if not here or not log.is_file():
        return None
    states = (
        (checkpoints.folder / f"step_{here[-1]}" / STATE_NAME).read_text(),
        remote.read(f"{CHECKPOINTS}/step_{newest}/{STATE_NAME}"),
    )
    last = min(here[-1], newest) - any(f'"{UNVALIDATED}"' in state for state in states)
    ours, theirs = log.read_text(), remote.read(LOG_NAME)
    parted = first_difference(ours, theirs, last)
    if parted is not None and parted == min(_lines(ours).keys() | _lines(theirs).keys()):
        raise _other_run(remote.url, checkpoints.folder.parent, parted)
    return parted


def _other_run(url: str, folder: Path, step: int) -> RemoteError:
    return RemoteError(
        f"run.dir: {url} has another run than the working folder {folder}: they differ from step {step} on: to go on "
        "with the one there, give another run.work_dir, or move that folder away; to go on with this one, another "
        "run.dir"
    )


def _newest_whole(
    remote: RemoteFolder, files: dict[str, int], warn: Callable[[str], None], *, needed: bool
) -> int | None:
    damages = []
    for step in reversed(complete_steps(files)):
        if not (damage := remote.damage(step, files)):
            return step
        damages.append(f"the checkpoint of step {step} is not whole ({damage})")
        warn(f"{remote.url}: {damages[-1]}, and is left out")
    if damages and needed:
        raise RemoteError(
            f"run.dir: {remote.url}: {'; '.join(damages)}: bring back what is missing, or begin anew in another run.dir"
        )
    return None


def _bring_records(remote: RemoteFolder, checkpoints: Checkpoints) -> None:
    """Records of a run, unless those here are further."""
    files, folder = remote.files(), checkpoints.folder.parent
    if LOG_NAME not in files:
        return
    here, there = checkpoints.complete(), complete_steps(files)
    if there and (parted := _parting(remote, checkpoints, there[-1])) is not None:
        raise _other_run(remote.url, folder, parted)
    log, theirs = folder / LOG_NAME, remote.read(LOG_NAME)
    ours = log.read_text() if log.is_file() else ""
    if here[-1:] <= there[-1:] and not (ours.startswith(theirs) and len(ours) > len(theirs)):
        remote.get(_records(files), folder)


def _replace_records(folder: Path, records: Path) -> None:
    for name in REPLACED:
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)
        else:
            (folder / name).unlink(missing_ok=True)
    shutil.copytree(records, folder, dirs_exist_ok=True)
    shutil.rmtree(records)


def _records(files: dict[str, int]) -> list[str]:
    return [name for name in files if not name.startswith(STAYS) and not name.endswith((OWNER_NAME, PARTIAL))]
