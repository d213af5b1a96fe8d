"""Signals that ask for an end: SIGUSR1 for one after the current step, with a checkpoint; SIGTERM for one at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

STOPPED = 75
"""Exit status of a run that stopped as asked and goes on by the same command (``EX_TEMPFAIL`` of sysexits.h)."""


class StopRequest:
    """Attributes: ``asked``, whether anybody has asked."""

    def __init__(self) -> None:
        self.asked = False

    def ask(self) -> None:
        """Ask; asking again changes nothing."""
        self.asked = True


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """A request that SIGUSR1 makes while in here (in the main thread; elsewhere Python takes no signals)."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = signal.signal(signal.SIGUSR1, lambda number, frame: request.ask())
    try:
        yield request
    finally:
        signal.signal(signal.SIGUSR1, before)


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM is as Ctrl-C while in here, so that nothing half made stays (in the main thread, as above)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
