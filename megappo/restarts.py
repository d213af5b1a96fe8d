"""Starting over from the last checkpoint after a worker or a node was lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from megappo.cluster.calls import WorkerLost

Result = TypeVar("Result")


class Progress(Protocol):
    """Of a run (:class:`megappo.run.Run`)."""

    @property
    def last_checkpoint(self) -> Path | None:
        """The last complete one, if any."""

    def warn(self, text: str) -> None:
        """Tell a person."""


def with_restarts(attempt: Callable[[], Result], progress: Progress, limit: int) -> Result:
    """Call until it returns, again after each loss of a worker.

    Args:
        attempt: begins at the last checkpoint each time, with new processes.
        progress: where it has come to.
        limit: further attempts without a new checkpoint in between. Errors other than a loss, a reward that cannot be
            imported for instance, would come again and are not tried again.

    Raises:
        WorkerLost: once more, though there was no new checkpoint.
    """
    left, checkpoint = limit, progress.last_checkpoint
    while True:
        try:
            return attempt()
        except WorkerLost as loss:
            if progress.last_checkpoint != checkpoint:
                left, checkpoint = limit, progress.last_checkpoint
            if not left:
                raise
            left -= 1
            where = "from the beginning" if checkpoint is None else f"from the checkpoint {checkpoint.name}"
            progress.warn(f"{loss}\nstarting over {where} (restart {limit - left} of run.restarts = {limit})")
