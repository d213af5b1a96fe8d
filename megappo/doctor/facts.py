"""What there is on one node."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megappo.fit.devices import Device
from megappo.host_memory import host_memory
from megappo.stack import Wanted, installed_version, problems

GIB = 1 << 30
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Facts:
    """Of one node, as a process there sees it.

    Attributes:
        host: name.
        clock: Unix seconds, taken as this was looked at.
        cores: that the process may run on.
        memory: bytes that processes here may take.
        shared_memory: bytes of ``/dev/shm``, and what is free there.
        open_files: soft and hard limit.
        locked_memory: the same, in bytes; None: as much as there is.
        versions: of Python and packages.
        lacking: packages that are missing or of other versions than run together.
        devices: all GPUs of the node.
        disk_free: bytes left in the run's folder.
        write_rate: into the run's folder, in bytes a second; None if nothing can be written there.
    """

    host: str
    clock: float
    cores: int
    memory: int
    shared_memory: tuple[int, int]
    open_files: tuple[int, int]
    locked_memory: tuple[int | None, int | None]
    versions: dict[str, str]
    lacking: tuple[str, ...]
    devices: tuple[Device, ...]
    disk_free: int
    write_rate: float | None


def look(run_dir: str, wanted: Sequence[Wanted], probe_bytes: int = 256 << 20) -> Facts:
    """Look around on this node.

    Args:
        run_dir: a file is written there (or in the nearest folder above that is there), and removed.
        wanted: packages that a run needs.
        probe_bytes: size of that file.
    """
    clock = time.time()
    folder = next(path for path in (Path(run_dir).resolve(), *Path(run_dir).resolve().parents) if path.is_dir())
    shared = shutil.disk_usage(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = resource.RLIM_INFINITY
    found = {package.name: installed_version(package.name) or "-" for package in wanted}
    return Facts(
        host=socket.gethostname(),
        clock=clock,
        cores=len(os.sched_getaffinity(0)),
        memory=host_memory(),
        shared_memory=(shared.total, shared.free) if shared else (0, 0),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        locked_memory=(None if soft == unlimited else soft, None if hard == unlimited else hard),
        versions={"python": platform.python_version(), **found},
        lacking=tuple(problems(wanted)),
        devices=_devices(),
        disk_free=shutil.disk_usage(folder).free,
        write_rate=_write_rate(folder, probe_bytes),
    )


def _devices() -> tuple[Device, ...]:
    """All GPUs of the node, whichever this process was given; none where there is no driver."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = [line.rsplit(", ", 2) for line in lines]
    return tuple(Device(name, int(total) << 20, int(free) << 20) for name, total, free in rows)


def _write_rate(folder: Path, size: int) -> float | None:
    """Bytes a second that reach the disk: the page cache does not count."""
    path = folder / f".megappo-doctor-{socket.gethostname()}-{os.getpid()}"
    block = os.urandom(min(size, 16 << 20))  # nothing that a file system could compress
    try:
        began = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            for _ in range(max(size // len(block), 1)):
                file.write(block)
            os.fsync(file.fileno())
        return max(size // len(block), 1) * len(block) / (time.perf_counter() - began)
    except OSError:
        return None
    finally:
        path.unlink(missing_ok=True)
