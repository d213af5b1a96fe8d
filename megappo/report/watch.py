"""``megappo report RUN --watch``: the page of a run that goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from megappo.report.html import write_report
from megappo.report.run_log import LOG_NAME, SAMPLES_NAME
from megappo.report.versions import VERSIONS_NAME

WATCHED = ("config.yaml", VERSIONS_NAME, LOG_NAME, SAMPLES_NAME)
LOOK_EVERY_S = 1.0
REFRESH_S = 10
"""The open page loads itself anew this often."""


def watch(
    run: Path,
    *,
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Write the report of a run whenever its files change, until Ctrl-C; then once more, as a page that stays.

    A run folder that is not there yet is waited for. A log that cannot be read now, as somebody edited it, or a full
    disk, is told once and tried again after the next change.

    Args:
        say: gets one line for whoever watches.
        sleep: as ``time.sleep``.
    """
    told = ""
    seen: tuple[object, ...] | None = None
    try:
        while True:
            if not run.is_dir():
                text = f"{run} is not there yet: waiting for it (Ctrl-C ends)"
            elif (state := _state(run)) == seen:
                text = told
            else:
                text, seen = _write(run, REFRESH_S), state
            if text != told:
                say(text)
                told = text
            sleep(LOOK_EVERY_S)
    except KeyboardInterrupt:
        if run.is_dir():
            say(_write(run, None))


def _write(run: Path, refresh_s: int | None) -> str:
    """Write the page; returns what to say of it."""
    try:
        path = write_report(run, refresh_s=refresh_s)
    except (OSError, ValueError) as error:
        return f"{run}: no new report: {error}"
    return str(path) if refresh_s is None else f"{path}: written anew as the run goes on (Ctrl-C ends)"


def _state(run: Path) -> tuple[object, ...]:
    """What changes when one of the run's files does."""
    out: list[object] = []
    for name in WATCHED:
        try:
            status = (run / name).stat()
            out.append((name, status.st_ino, status.st_size, status.st_mtime_ns))
        except OSError:
            out.append((name, None))
    return tuple(out)
