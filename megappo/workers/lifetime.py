"""How long a worker process lives: no longer than the process that started it."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


def end_with_parent() -> None:
    """Have the kernel kill this process as soon as the one that started it is gone.

    A worker that Ray has asked to leave talks to Ray's node process first, and waits for up to a minute for one that
    has ended before; one of vLLM's does not look at all while it starts.
    """
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it went in between
        os._exit(1)
