"""A run's folder behind a URL, by fsspec: what is in it, and which checkpoints of it are complete.

A checkpoint is complete once its last file, the trainer's state, is up; it is the first to go when one is removed. It
holds the sizes of all others, by which is seen whether the checkpoint is still whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

from fsspec.core import url_to_fs

from megappo.checkpoints import BEST, FILES, PARTIAL, STATE_NAME, step_of
from megappo.time_limit import within

OWNER_NAME = ".owner"
"""Who writes to the folder: the last one who came."""
CHECKPOINTS = "checkpoints"
UNKNOWN = -1
"""Bytes of a file whose size the file system does not tell."""
ANSWER_S = 120.0
"""Seconds in which a remote folder must take one small file."""


class RemoteError(ValueError):
    """The remote folder cannot be used."""


class OwnerMissing(OSError):
    """Nobody owns the remote folder: its files are gone, for good or until the file system is back."""


class TakenOver(RuntimeError):
    """Another process writes to the remote folder by now."""


class RemoteFolder:
    """Files by their names below the URL. What goes wrong is raised as fsspec, or the library below it, has it.

    Args:
        url: of the folder, which need not exist yet.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.fs, self.root = url_to_fs(url, use_listings_cache=False)  # what others have changed must be seen

    @classmethod
    def reached(cls, url: str) -> RemoteFolder:
        """The folder of a URL where files can be written.

        Raises:
            RemoteError: they cannot, or it does not answer.
        """
        name, text = f".probe-{secrets.token_hex(4)}", "megappo\n"

        def written() -> RemoteFolder:
            remote = cls(url)
            remote.write(name, text)
            found = remote.read(name)
            remote.fs.rm_file(remote._at(name))
            if found != text:
                raise OSError("what was written is not what is read")
            return remote

        try:
            return within(ANSWER_S, written)
        except Exception as error:
            reason = " ".join(str(error).split())
            raise RemoteError(
                f"run.dir: {url} cannot be written ({type(error).__name__}: {reason}): look at the name, the network "
                "and the credentials, or choose another"
            ) from error

    def files(self) -> dict[str, int]:
        """Bytes of each file, or UNKNOWN."""
        self.fs.invalidate_cache()
        found = self.fs.find(self.root, detail=True)
        if not found:  # of a place that does not answer, too
            with contextlib.suppress(FileNotFoundError):
                self.fs.ls(self.root, detail=False)
        start = len(self.root.rstrip("/")) + 1
        sizes = {name[start:]: info.get("size") for name, info in found.items()}
        return {name: UNKNOWN if size is None else int(size) for name, size in sizes.items()}

    def put(self, path: Path, name: str) -> None:
        """Copy one file there; whoever reads it gets all of the old or of the new one."""
        partial = self._at(name + PARTIAL)
        self._put([path], [partial])
        self.fs.mv(partial, self._at(name))

    def put_checkpoint(self, folder: Path) -> None:
        """Copy a checkpoint there, the trainer's state last."""
        self.remove_checkpoint(folder.name)  # what is left of one that broke off
        below, state = f"{CHECKPOINTS}/{folder.name}/", folder / STATE_NAME
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path != state]
        self._put(paths, [self._at(below + path.relative_to(folder).as_posix()) for path in paths])
        self._put([state], [self._at(below + STATE_NAME)])

    def damage(self, step: int, files: Mapping[str, int]) -> str:
        """What a complete checkpoint among the files lacks of what its state lists; empty if it is whole."""
        below = f"{CHECKPOINTS}/step_{step}/"
        try:
            sizes = json.loads(self.read(below + STATE_NAME)).get(FILES, {})
        except (ValueError, AttributeError):
            return f"{STATE_NAME} is empty or damaged"
        for name, size in sizes.items():
            if (found := files.get(below + name)) is None:
                return f"{name} is missing"
            if found not in (size, UNKNOWN):
                return f"{name} has {found:,} bytes of {size:,}"
        return ""

    def whole_steps(self, files: Mapping[str, int]) -> list[int]:
        """Steps of the complete checkpoints among the files that are whole, ascending."""
        return [step for step in complete_steps(files) if not self.damage(step, files)]

    def remove_checkpoint(self, name: str) -> None:
        """Remove a checkpoint, or what there is of it, the trainer's state first."""
        folder = self._at(f"{CHECKPOINTS}/{name}")
        self.fs.invalidate_cache()
        if self.fs.exists(f"{folder}/{STATE_NAME}"):
            self.fs.rm_file(f"{folder}/{STATE_NAME}")
        if self.fs.exists(folder):
            self.fs.rm(folder, recursive=True)

    def get(self, names: Iterable[str], into: Path, below: str = "") -> None:
        """Copy files into a folder here, by their names without what they begin with."""
        paths = {name: into / name.removeprefix(below) for name in names}
        for path in paths.values():
            path.parent.mkdir(parents=True, exist_ok=True)
        self.fs.get(list(map(self._at, paths)), list(map(str, paths.values())))  # several at a time, where it can

    def read(self, name: str) -> str:
        """The text of a small file; empty where there is none."""
        try:
            return self.fs.cat_file(self._at(name)).decode()
        except FileNotFoundError:
            return ""

    def write(self, name: str, text: str) -> None:
        """Write a small file."""
        self._make_folders([self._at(name)])
        self.fs.pipe_file(self._at(name), text.encode())

    def claim(self) -> str:
        """Become the one who writes there; returns what :meth:`check_claim` wants."""
        claim = f"host {socket.gethostname()}, pid {os.getpid()}, {secrets.token_hex(4)}\n"
        self.write(OWNER_NAME, claim)
        return claim

    def check_claim(self, claim: str) -> None:
        """Nobody has claimed it since.

        Raises:
            TakenOver: somebody has; says who.
            OwnerMissing: there is no claim at all, as where a file system is not mounted.
        """
        if not (owner := self.read(OWNER_NAME)):
            raise OwnerMissing(
                f"what was written there ({OWNER_NAME}) is gone: mount it again; or, if it was removed, start again"
            )
        if owner != claim:
            raise TakenOver(owner.rpartition(",")[0])

    def _at(self, name: str) -> str:
        return f"{self.root.rstrip('/')}/{name}"

    def _put(self, paths: list[Path], names: list[str]) -> None:
        self._make_folders(names)
        self.fs.put(list(map(str, paths)), names)

    def _make_folders(self, names: list[str]) -> None:
        """Where there are folders: what begins with a bucket has none, and making one would make a mistyped bucket."""
        if self.root.startswith("/"):
            for parent in sorted({os.path.dirname(name) for name in names}):
                self.fs.makedirs(parent, exist_ok=True)


def complete_steps(files: Iterable[str]) -> list[int]:
    """Steps of the complete checkpoints among the files of a remote folder, ascending."""
    parts = [name.split("/") for name in files]
    found = [step_of(one[1]) for one in parts if len(one) == 3 and (one[0], one[2]) == (CHECKPOINTS, STATE_NAME)]
    return sorted(step for step in found if step is not None)


def superfluous(files: Iterable[str], whole: list[int], keep: int, best: str) -> list[str]:
    """Names of checkpoints among the files that may go: all but the last few that are whole, and the best.

    Args:
        whole: steps of the checkpoints that are whole, ascending.
        keep: number of those that stay.
        best: name of one that stays too.
    """
    names = {name.split("/")[1] for name in files if name.startswith(f"{CHECKPOINTS}/") and name.count("/") > 1}
    kept = {f"step_{step}" for step in whole[-keep:]} | {best, BEST}
    return sorted(names - kept)
