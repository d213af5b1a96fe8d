"""A run's folder goes up to its URL in the background, so that a run which is lost with its machine goes on elsewhere.

One thread compares the folder with what it has sent and sends what has changed: logs and rollouts first, then the
newest checkpoint and the best, so that whoever finds a checkpoint there has all that came before it. Nothing queues up:
where the remote side is slow, what changed meanwhile goes with the next round, and checkpoints in between are left out.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from megappo.checkpoints import BEST, PARTIAL, Checkpoints
from megappo.remote.folder import CHECKPOINTS, OwnerMissing, RemoteFolder, TakenOver, superfluous
from megappo.run_lock import LOCK_NAME

EVERY_S = 30.0
"""Seconds between two rounds; after failures more, up to MOST_S."""
MOST_S = 300.0
SLOW_S = 600.0
"""One file may take so long until it is told."""
SENT_NAME = ".sent.json"
"""In the run's folder: the rollouts that are up, for the process after this one."""
MOST_FAILURES = 3
"""Files of a round that may fail until all are taken to."""

Stamp = tuple[int, int]


class Uploads:
    """Sends what changes in a run's folder, from construction to :meth:`close`.

    Args:
        folder: of the run.
        remote: where to. It belongs to this process until another claims it.
        checkpoints: of the run. The one that is on its way is held.
        warn: called with what a person should know, by the thread that calls :meth:`tell` or :meth:`close`.
        every_s: seconds between two rounds.
    """

    def __init__(
        self,
        folder: Path,
        remote: RemoteFolder,
        checkpoints: Checkpoints,
        warn: Callable[[str], None],
        every_s: float = EVERY_S,
    ) -> None:
        self.folder, self.remote, self.checkpoints = folder.resolve(), remote, checkpoints
        self._claim, self._warn, self._every_s = remote.claim(), warn, every_s
        self._sent: dict[str, Stamp] = {}
        self._remembered: dict[str, Stamp] = {}
        self._complete: set[int] | None = None  # checkpoints that are whole there; not looked yet
        self._news: list[str] = []
        self._at: tuple[str, float] | None = None
        self._told_slow = ""
        self._lost = False
        self._closing, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)  # it may hang
        self._thread.start()

    def tell(self) -> None:
        """Pass on what a person should know by now."""
        while self._news:
            self._warn(self._news.pop(0))
        if (at := self._at) and time.monotonic() - at[1] > SLOW_S and at[0] != self._told_slow:
            self._told_slow = at[0]
            self._warn(f"{at[0]} has been going up to {self.remote.url} for {SLOW_S / 60:g} minutes; training goes on")

    def close(self, limit_s: float, say: Callable[[str], None]) -> None:
        """Send the rest, but take no longer than the limit; what is not up then is told, and nothing more is begun."""
        self._closing.set()
        try:
            self._thread.join(1.0)
            if self._thread.is_alive():
                say(f"waiting up to {limit_s:g} s until everything is up at {self.remote.url} (Ctrl-C: no longer)")
            self._thread.join(max(limit_s - 1.0, 0.0))
        finally:
            self._over.set()
            self.tell()
            if waiting := self.waiting():
                shown = ", ".join(waiting[:3]) + (f" and {len(waiting) - 3} more" if len(waiting) > 3 else "")
                self._warn(f"not up at {self.remote.url}: {shown}; they are in {self.folder}{self._way_out()}")

    def waiting(self) -> list[str]:
        """What is not up yet: checkpoints, and other files by their names."""
        there = self._complete or set()
        steps = [step for step in self._wanted() if step not in there]
        return [f"{CHECKPOINTS}/step_{step}" for step in steps] + [name for name, _ in self._changed()]

    def _way_out(self) -> str:
        return "" if self._lost else ", and the same command sends them"

    # --- in the thread -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        pause, failing = self._every_s, False
        while True:
            last = self._closing.wait(pause)
            try:
                self._round()
            except TakenOver as other:
                self._lost = True
                self._news.append(
                    f"{self.remote.url}: another run writes there now ({other}): nothing more goes up from here"
                )
                return
            except Exception as error:
                if not failing:
                    reason = " ".join(str(error).split())
                    self._news.append(
                        f"sending to {self.remote.url} failed ({type(error).__name__}: {reason}); it is tried again, "
                        "and training goes on"
                    )
                failing, pause = True, min(2 * pause, MOST_S)
                if last and self._over.wait(min(self._every_s, 1.0)):
                    return
                continue
            if failing:
                self._news.append(f"{self.remote.url} has everything again")
            failing, pause = False, self._every_s
            if last:
                return

    def _round(self) -> None:
        try:
            self.remote.check_claim(self._claim)
        except OwnerMissing:  # what was sent lately may be gone as well
            self._complete, self._sent = None, {}
            raise
        if self._complete is None:
            self._look()
        steps = self._wanted()  # before the logs: these have all that came before the checkpoints
        failures: list[tuple[str, Exception]] = []
        for name, stamp in self._changed():
            if self._over.is_set():
                return
            try:
                self._send(name, lambda name=name: self.remote.put(self.folder / name, name))  # type: ignore[misc]
                self._sent[name] = stamp
            except Exception as error:
                if (self.folder / name).exists():
                    failures.append((name, error))
            if len(failures) == MOST_FAILURES:
                break
        if not any(_is_needed(name) for name, _ in failures) and len(failures) < MOST_FAILURES:
            for step in steps:
                self._send_checkpoint(step)
        self._remember()
        if failures:
            raise failures[0][1]

    def _look(self) -> None:
        """What an earlier process has sent: rollouts that have changed neither here nor, by their size, there."""
        files, remembered = self.remote.files(), remembered_rollouts(self.folder, self.remote.url)
        for name, stamp in self._changed():
            if remembered.get(name) == stamp and files.get(name) == stamp[0]:
                self._sent[name] = stamp
        self._complete = set(self.remote.whole_steps(files))

    def _remember(self) -> None:
        sent = {name: stamp for name, stamp in self._sent.items() if name.startswith("rollouts/")}
        if sent != self._remembered:
            partial = self.folder / f"{SENT_NAME}{PARTIAL}"
            partial.write_text(json.dumps({"url": self.remote.url, "rollouts": sent}))
            partial.replace(self.folder / SENT_NAME)
            self._remembered = sent

    def _send_checkpoint(self, step: int) -> None:
        assert self._complete is not None
        name = f"step_{step}"
        folder = self.checkpoints.folder / name
        self.checkpoints.held = name
        try:
            if step not in self._complete and folder.is_dir() and not self._over.is_set():
                self._send(f"{CHECKPOINTS}/{name}", lambda: self.remote.put_checkpoint(folder))
                self._complete.add(step)
                self._prune()
        except FileNotFoundError:
            if folder.is_dir():
                raise
        finally:
            self.checkpoints.held = ""

    def _prune(self) -> None:
        best = self.checkpoints.best()
        if best is not None:
            self.remote.write(f"{CHECKPOINTS}/{BEST}", f"step_{best}\n")
        spared = self.remote.read(f"{CHECKPOINTS}/{BEST}").strip()  # by a machine before this one, perhaps
        files = self.remote.files()
        whole = self.remote.whole_steps(files)
        gone = superfluous(files, whole, self.checkpoints.keep, spared)
        for name in gone:
            self.remote.remove_checkpoint(name)
        self._complete = {step for step in whole if f"step_{step}" not in gone}

    def _send(self, name: str, send: Callable[[], None]) -> None:
        self._at = name, time.monotonic()
        try:
            send()
        finally:
            self._at = None

    # --- what there is to send ---------------------------------------------------------------------------------------

    def _wanted(self) -> list[int]:
        """Steps of the checkpoints that should be there: the newest, then the best."""
        newest, best = self.checkpoints.complete()[-1:], self.checkpoints.best()
        return [*newest, *([best] if best is not None and best not in newest else [])]

    def _changed(self) -> Iterator[tuple[str, Stamp]]:
        """Files besides checkpoints that have changed since they were sent, the run's own records first."""
        for path in _files(self.folder):
            name = path.relative_to(self.folder).as_posix()
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            stamp = status.st_size, status.st_mtime_ns
            if self._sent.get(name) != stamp:
                yield name, stamp


def _files(folder: Path) -> Iterator[Path]:
    for at, folders, names in os.walk(folder):
        if Path(at) == folder:
            folders[:] = [name for name in folders if name != CHECKPOINTS]
        folders.sort()
        for name in sorted(names):
            path = Path(at, name)
            if name not in (LOCK_NAME, SENT_NAME) and not name.endswith((PARTIAL, ".tmp")) and not path.is_symlink():
                yield path


def remembered_rollouts(folder: Path, url: str) -> dict[str, Stamp]:
    """The rollouts in a run's folder that an earlier process has sent to the URL, as they were then."""
    try:
        stored = json.loads((folder / SENT_NAME).read_text())
        return {name: (size, at) for name, (size, at) in stored["rollouts"].items()} if stored["url"] == url else {}
    except (OSError, ValueError, KeyError):  # there is none, or half of one: all of them go up again
        return {}


def _is_needed(name: str) -> bool:
    """Whether a run that goes on from a checkpoint there would miss it."""
    return "/" not in name or name.startswith("rollouts/")
