"""The checkpoints of a run: ``step_N`` is complete or absent, never half."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STATE_NAME = "trainer.json"
FILES = "files"
"""In the trainer's state: the size of every other file of the checkpoint, in bytes."""
PARTIAL = ".partial"
BEST = "best"
DATA = "data"
"""In the trainer's state: fingerprint of what the run trains on. Checkpoints of earlier versions have none."""
UNVALIDATED = "unvalidated"
"""In the trainer's state, where the step's validation is still to come: its metrics so far, which no log has yet."""


NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""How a write fails where the disk is full, or what its user may have of it."""


class DiskFull(RuntimeError):
    """A checkpoint did not fit onto the disk, or into the user's quota; the one before is untouched."""


class DamagedCheckpoint(RuntimeError):
    """A checkpoint lacks files that it had, or they are shorter."""


class OldCheckpoint(RuntimeError):
    """A checkpoint of an earlier version, which lacks what a run needs to go on exactly."""


@dataclass(frozen=True)
class Best:
    """The step with the best value so far."""

    step: int
    value: float

    def better_of(self, before: Best | None, mode: str) -> Best:
        """This or the one before; the earlier of equals, and never what is no number if there is a choice.

        Args:
            mode: "max" or "min".
        """
        if before is None or math.isnan(before.value):
            return self
        better = self.value > before.value if mode == "max" else self.value < before.value
        return self if better else before


class Checkpoints:
    """``RUN/checkpoints``; ``best`` in it is a link to the best of them, where one is looked for.

    Args:
        folder: of the checkpoints; made when the first is written.
        keep: number of latest checkpoints that stay, besides the best.
        before_naming: called when a checkpoint is written, before it gets its name; if it raises, there is none.

    Attributes:
        held: name of a checkpoint that is being read, and therefore stays for now.
    """

    def __init__(self, folder: str | Path, keep: int, before_naming: Callable[[], None] = lambda: None) -> None:
        self.folder = Path(folder).resolve()
        self.keep = keep
        self.held = ""
        self._before_naming = before_naming

    def latest(self) -> Path | None:
        """The last complete checkpoint, if any."""
        complete = self.complete()
        return self.folder / f"step_{complete[-1]}" if complete else None

    def complete(self) -> list[int]:
        """Steps of the complete checkpoints, ascending. A folder without the trainer's state is none."""
        steps = map(step_of, (path.parent.name for path in self.folder.glob(f"step_*/{STATE_NAME}")))
        return sorted(step for step in steps if step is not None)

    def best(self) -> int | None:
        """Step of the best one, where it is kept and still there."""
        link = self.folder / BEST
        return step_of(link.resolve().name) if (link / STATE_NAME).is_file() else None

    @contextmanager
    def writing(self, step: int, best: int | None = None) -> Iterator[Path]:
        """A folder to write a checkpoint into; it gets its name only if nothing is raised, and older ones are removed.

        ``best`` is the step whose checkpoint stays in any case.

        The state of the trainer must be written last, by :meth:`write_state`.

        Raises:
            DiskFull: what was raised inside came of it.
        """
        final = self.folder / f"step_{step}"
        partial = final.with_name(final.name + PARTIAL)
        for leftover in self.folder.glob(f"step_*{PARTIAL}"):
            shutil.rmtree(leftover)
        partial.mkdir(parents=True)
        try:
            yield partial
        except Exception as error:
            if not self._is_full(error):
                raise
            shutil.rmtree(partial, ignore_errors=True)
            raise DiskFull(
                f"{self.folder}: the disk is full (or a quota of it), so that the checkpoint of step {step} could "
                "not be written: make room (run.keep_checkpoints, run.dump_rollouts); the same command goes on from "
                "the checkpoint before"
            ) from error
        if not (partial / STATE_NAME).is_file():
            raise RuntimeError(f"{partial}: the checkpoint was not finished")
        sync_tree(partial)
        self._before_naming()
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        self._link_best(best)
        _sync(self.folder)
        for old in self.complete()[: -self.keep]:
            if old != best and f"step_{old}" != self.held:
                self.remove(old)

    def remove(self, step: int) -> None:
        """Remove a checkpoint. Renamed first, so that a removal that is cut short leaves no half one behind."""
        old = self.folder / f"step_{step}"
        old.rename(doomed := old.with_name(old.name + PARTIAL))
        shutil.rmtree(doomed)

    def amend(self, folder: Path, state: dict[str, Any], best: int | None) -> None:
        """Give a checkpoint that is complete another state of the trainer; and the step that is the best now."""
        self.write_state(folder, state)
        self._link_best(best)

    def _is_full(self, error: Exception) -> bool:
        # By its words: it comes from a worker, as text.
        return any(os.strerror(code) in str(error) for code in NO_ROOM) or shutil.disk_usage(self.folder).free < 2**20

    def _link_best(self, step: int | None) -> None:
        if step is not None and (self.folder / f"step_{step}").is_dir():
            link = self.folder / f"{BEST}{PARTIAL}"
            link.unlink(missing_ok=True)
            link.symlink_to(f"step_{step}")
            link.replace(self.folder / BEST)

    @staticmethod
    def write_state(folder: Path, state: dict[str, Any]) -> None:
        """Write the trainer's own state into a checkpoint, whole, and what files of which size it has."""
        files = {name: size for name, size in _sizes(folder).items() if not name.startswith(STATE_NAME)}
        partial = folder / f"{STATE_NAME}{PARTIAL}"
        partial.write_text(json.dumps({**state, FILES: files}, indent=1))
        _sync(partial)
        partial.replace(folder / STATE_NAME)

    @staticmethod
    def read_state(folder: Path, needed: Iterable[str] = ()) -> dict[str, Any]:
        """Read what :meth:`write_state` wrote.

        Raises:
            DamagedCheckpoint: it cannot be read, or files are not as they were.
            OldCheckpoint: some of what is needed is not in it.
        """
        way_out = f"remove {folder} to go on from the checkpoint before, or start a new run (another run.dir)"
        try:
            state = json.loads((folder / STATE_NAME).read_text())
        except (OSError, ValueError) as error:
            raise DamagedCheckpoint(f"{folder / STATE_NAME}: cannot be read ({error}): {way_out}") from None
        found = _sizes(folder)
        wrong = [
            f"{name} has {found[name]} of {size} bytes" if name in found else f"{name} is missing"
            for name, size in state.pop(FILES, {}).items()
            if found.get(name) != size
        ]
        if wrong:
            raise DamagedCheckpoint(f"{folder}: {', '.join(wrong[:3])}{' ...' * (len(wrong) > 3)}: {way_out}")
        if lacking := sorted(set(needed) - state.keys()):
            raise OldCheckpoint(
                f"{folder}: written by another version of megappo ({STATE_NAME} has no {', '.join(lacking)}), so that "
                "this run cannot go on exactly where it was: go on with that version; or start a new run (another "
                "run.dir) from its weights: megappo convert, and the folder it writes as model"
            )
        return state


def _sizes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def step_of(name: str) -> int | None:
    """The step of a complete checkpoint by its name; None for any other name."""
    number = name.removeprefix("step_")
    return int(number) if number != name and number.isdigit() else None


def sync_tree(folder: Path) -> None:
    """Have everything on the disk before the rename says it is there."""
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
