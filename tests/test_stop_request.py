"""SIGUSR1 asks for an end after the current step, and does nothing else."""

from __future__ import annotations

import os
import signal
import threading

from megappo.stop_request import stop_request


def test_a_signal_asks() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with stop_request() as stop:
        assert not stop.asked
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.asked
    assert signal.getsignal(signal.SIGUSR1) is before


def test_threads_take_no_signals() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    asked = []

    def work() -> None:
        with stop_request() as stop:
            stop.ask()
            asked.append(stop.asked)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert asked == [True] and signal.getsignal(signal.SIGUSR1) is before
