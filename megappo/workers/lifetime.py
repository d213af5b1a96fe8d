"""How long a worker process lives: no longer than the process that started it."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


def end_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process as soon as the one that started it is gone.

    Args:
        parent: that one's number; whoever leaves it out does not notice one that is gone already.

    A worker that Ray has asked to leave talks to Ray's node process first, and waits for up to a minute for one that
    has ended before; one of vLLM's does not look at all while it starts.
    """
    if parent is None:
        parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it went before that
        os._exit(1)
