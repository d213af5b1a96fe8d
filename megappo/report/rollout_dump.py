"""RUN/rollouts: the whole batch of each step as a parquet file, written while training goes on."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

FOLDER_NAME = "rollouts"


class RolloutDump:
    """Writes ``RUN/rollouts/step_N.parquet`` in a thread, one file at a time; a file is complete or absent.

    What goes wrong in the thread is raised by the next call of any method.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.folder = Path(run_dir) / FOLDER_NAME
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout-dump")
        self._pending: Future[None] | None = None

    def write(self, step: int, rows: pa.Table) -> None:
        """Begin to write a step's batch, once the one before is written."""
        self.wait()
        self._pending = self._thread.submit(self._write, step, rows)

    def wait(self) -> None:
        """Return when everything is in its file."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait, and end the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _write(self, step: int, rows: pa.Table) -> None:
        self.folder.mkdir(exist_ok=True)
        final = self.folder / f"step_{step}.parquet"
        partial = final.with_name(f"{final.name}.partial")
        with partial.open("wb") as file:
            pq.write_table(rows, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, final)
