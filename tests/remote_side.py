"""A place at a URL that fails as told, and a run's folder that goes up to one, for tests."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from megappo.checkpoints import Checkpoints
from megappo.remote.down import bring_down
from megappo.remote.folder import RemoteFolder
from megappo.remote.uploads import Uploads


class FailingFileSystem(MemoryFileSystem):
    """Memory in which one may have uploads fail, or wait, by a part of their names."""

    protocol = ("failing",)
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    broken: ClassVar[set[str]] = set()
    put_names: ClassVar[list[str]] = []
    gate: ClassVar[threading.Event] = threading.Event()

    def put_file(self, lpath: str, rpath: str, *args: Any, **options: Any) -> None:
        self.put_names.append(rpath.partition("/run/")[2])
        if any(part in rpath for part in self.broken):
            super().put_file(lpath, rpath, *args, **options)
            self.store[rpath].truncate(1)  # what an upload that broke off may leave
            raise ConnectionResetError("the connection broke")
        if "slow" in Path(lpath).name:
            assert self.gate.wait(60)
        super().put_file(lpath, rpath, *args, **options)


fsspec.register_implementation("failing", FailingFileSystem)


@pytest.fixture(autouse=True)
def empty_memory() -> Iterator[None]:
    for kind in (MemoryFileSystem, FailingFileSystem):
        kind.store.clear()
        kind.pseudo_dirs[:] = [""]
    FailingFileSystem.broken.clear()
    FailingFileSystem.put_names.clear()
    FailingFileSystem.gate.clear()
    yield
    FailingFileSystem.gate.set()


def until(happened: Callable[[], Any], limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def line(step: int, by: str) -> str:
    """Of a log: no two runs have one that is the same, as it holds the time."""
    return json.dumps({"step": step, "time": by, "metrics": {}}) + "\n"


class Local:
    """A run's folder, written as a run writes it, and its uploads."""

    def __init__(self, folder: Path, url: str, keep: int = 2, every_s: float = 0.01) -> None:
        self.folder, self.warnings, self.said = folder, [], []
        folder.mkdir(parents=True, exist_ok=True)
        self.checkpoints = Checkpoints(folder / "checkpoints", keep)
        self.remote = RemoteFolder(url)
        self.came = bring_down(self.remote, self.checkpoints, self.said.append, self.warnings.append)
        self.uploads = Uploads(folder, self.remote, self.checkpoints, self.warnings.append, every_s)

    def step(self, step: int, best: int | None = None, file: str = "weights") -> None:
        with (self.folder / "log.jsonl").open("a") as log:
            log.write(line(step, self.folder.name))
        rollouts = self.folder / "rollouts"
        rollouts.mkdir(exist_ok=True)
        (rollouts / f"step_{step}.parquet").write_text(f"rows {step}")
        with self.checkpoints.writing(step, best) as folder:
            (folder / "actor").mkdir()
            (folder / "actor" / file).write_text(f"weights of {step}")
            self.checkpoints.write_state(folder, {"step": step})

    def close(self, limit_s: float = 60) -> None:
        self.uploads.close(limit_s, self.said.append)
