"""A lock on a file, which ends with the processes that have it, however they end."""

from __future__ import annotations

import fcntl
from typing import IO, Any


class NoFileLocks(OSError):
    """The file system has none; says so in words that can follow the name of a folder."""


def lock(file: IO[Any]) -> bool:
    """Lock an open file, without waiting.

    Returns:
        Whether it is ours now; otherwise another process has it.

    Raises:
        NoFileLocks: nobody can. Going on without would let two processes overwrite each other's files unseen.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # ENOLCK of NFS, ENOSYS of Lustre
        raise NoFileLocks(
            f"its file system gives no file locks ({error.strerror}), which keep two processes from writing there at "
            "once: choose a folder on another, or have it mounted with locks (Lustre: flock; NFS: version 4, or lockd)"
        ) from None
    return True
