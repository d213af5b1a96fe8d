"""The steps of a run, of PPO or on examples: what is due after one, and when to take no more."""

from __future__ import annotations

from typing import Protocol

from megappo.stop_request import StopRequest


class NoProgress(RuntimeError):
    """A run was asked to stop before it had done a single step; starting it again in the same time would not help."""


class Loop(Protocol):
    """Attributes: ``step``, the number of steps that are done."""

    step: int

    def train_step(self) -> bool:
        """Do one more; whether a checkpoint holds it."""


def take_steps(loop: Loop, last: int, stop: StopRequest) -> bool:
    """Take what is left of the steps, from a checkpoint or the beginning.

    Returns:
        Whether all are done; if not, a stop was asked for, and a checkpoint holds what is done.
    """
    saved = True
    while loop.step < last:
        if stop.asked and saved:
            return False
        saved = loop.train_step()
    return True


Done = tuple[int, bool]
"""How far a run is: the step of its last checkpoint, and whether that is validated."""


def require_progress(done: Done, before: Done) -> None:
    """Refuse to end as asked where the same command would only do the same again.

    Args:
        done: how far the run is.
        before: how far it was when this command began.

    Raises:
        NoProgress: no farther.
    """
    if done == before:
        raise NoProgress(
            "asked to stop (SIGUSR1) before a single step was done: give it more time, or ask later before its end"
        )


def is_due(step: int, every: int, last: int) -> bool:
    """Whether what comes every so many steps (0: never), and at the end, comes after this one, counted from 1."""
    return step == last or (every > 0 and step % every == 0)
