"""How much memory this machine has for this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("sys/fs/cgroup")


def host_memory(root: Path = Path("/")) -> int:
    """Bytes: all that the machine has, or what the control groups of the process leave it (containers, Slurm).

    Args:
        root: of the file system.
    """
    return min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_limits(root))


def _limits(root: Path) -> Iterator[int]:
    """Those of the process's group and of all that it is in: version 2 of control groups, and 1."""
    yield 1 << 62  # none
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            file = "memory/memory.limit_in_bytes" if controllers else "memory.max"
            folder, name = (root / CGROUPS / file).parent, Path(file).name
            group = Path(path.lstrip("/"))
            for each in (group, *group.parents):
                try:
                    yield int((folder / each / name).read_text())
                except (OSError, ValueError):  # it is not seen in a container, or is "max"
                    continue
