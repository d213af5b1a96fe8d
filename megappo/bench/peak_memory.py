"""How much memory a command and all its processes have at most."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import NamedTuple


class Peak(NamedTuple):
    """MiB over all processes: resident (a shared page counts once for each), and with shared pages counted once."""

    resident: float
    proportional: float
    seconds: float
    status: int


def peak_memory(command: list[str], interval_s: float = 0.02) -> Peak:
    """Run a command to its end, looking at its process group again and again."""
    begin = time.monotonic()
    process = subprocess.Popen(command, start_new_session=True)
    resident = proportional = 0.0
    while process.poll() is None:
        now = [_memory(pid) for pid in _members(process.pid)]
        resident, proportional = max(resident, sum(r for r, _ in now)), max(proportional, sum(p for _, p in now))
        time.sleep(interval_s)
    return Peak(resident, proportional, time.monotonic() - begin, process.returncode)


def _members(group: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(path.name)) == group:
                found.append(int(path.name))
        except ProcessLookupError:
            pass
    return found


def _memory(pid: int) -> tuple[float, float]:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return 0.0, 0.0
    sizes = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines}
    return sizes.get("Rss", 0.0), sizes.get("Pss", 0.0)
