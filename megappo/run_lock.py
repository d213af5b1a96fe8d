"""At most one process at a time may use a run's folder."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from megappo.file_lock import NoFileLocks, lock

LOCK_NAME = ".lock"


class RunInUse(RuntimeError):
    """Another process has the run's folder."""


class RunFolderError(ValueError):
    """The run's folder cannot be made, written or locked."""


class RunLock:
    """The lock of a run's folder, from construction to :meth:`release` or the end of the process, however it ends.

    Args:
        folder: ``run.dir``; made if need be.

    Raises:
        RunFolderError: it cannot be made, written or locked.
        RunInUse: another process has it; says which, as that one wrote it into the file.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Opened without truncation: what the owner wrote must still be there to be shown.
            self._file = os.fdopen(os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644), "r+")
        except OSError as error:
            raise RunFolderError(f"run.dir: {folder} cannot be written ({error.strerror}): choose another") from None
        try:
            ours = lock(self._file)
        except NoFileLocks as error:
            self._file.close()
            raise RunFolderError(f"run.dir: {folder}: {error}") from None
        if not ours:
            owner = self._file.read().strip() or "of unknown host"
            self._file.close()
            raise RunInUse(
                f"another run ({owner}) is using run.dir {folder}: wait for its end, or choose another run.dir"
            )
        self._file.truncate(0)
        self._file.write(f"host {socket.gethostname()}, pid {os.getpid()}\n")
        self._file.flush()

    def release(self) -> None:
        """Let others in. The file stays: removing it would let two processes lock two files of one name."""
        self._file.close()
