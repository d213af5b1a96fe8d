"""Conversion of a whole folder against copying its files: time, and the memory of all processes together."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from megappo.bench.peak_memory import peak_memory
from megappo.bench.shapes import make_qwen
from megappo.bench.table import BenchError, Row, show


def run(size: str, folder: str, out: str | None, *, rounds: int = 3) -> None:
    """Measure, alternating; all are synchronised with the disk, the best of each counts.

    Raises:
        BenchError: a conversion failed, or the weights did not come back as they were.
    """
    model = make_qwen(Path(folder) / size, size)
    made = {name: Path(folder) / f"{size}-{name}" for name in ("copied", "megatron", "back")}
    tool = [sys.executable, "-m", "megappo", "convert"]
    commands = {
        "copied": ["cp", "-r", str(model), str(made["copied"])],
        "megatron": [*tool, str(model), str(made["megatron"])],
        "back": [*tool, str(made["megatron"]), str(made["back"]), "--shard-gb", "0.2"],
    }
    best: dict[str, Row] = {}
    try:
        for _ in range(rounds):
            for name, command in commands.items():
                shutil.rmtree(made[name], ignore_errors=True)
                os.sync()
                begin = time.monotonic()
                peak = peak_memory(command)
                subprocess.run(["sync", "-f", str(made[name])], check=True)
                seconds = time.monotonic() - begin
                if peak.status:
                    raise BenchError(f"{' '.join(command)}: failed")
                memory = max(peak.resident, float(best.get(name, {}).get("peak MiB resident", 0)))
                seconds = min(seconds, float(best.get(name, {}).get("s", seconds)))
                best[name] = {"": name, "s": seconds, "peak MiB resident": memory}
        if not _same_bytes(made["copied"], made["back"]):
            raise BenchError(f"{made['back']}: differs from {model}")
    finally:
        for path in made.values():
            shutil.rmtree(path, ignore_errors=True)
    gigabytes = sum(path.stat().st_size for path in model.glob("*.safetensors")) / 1e9
    rows = [{**row, "times copying": float(row["s"]) / float(best["copied"]["s"])} for row in best.values()]
    show(f"conversion of {size}, {gigabytes:.2f} GB", rows, out)


def _same_bytes(a: Path, b: Path) -> bool:
    """Whether two folders hold the same tensors, however they are cut into files."""
    from megappo.formats.safetensors_files import find_tensors

    ours, theirs = find_tensors(a), find_tensors(b)

    def same(name: str) -> bool:
        whole = [0] * len(ours[name].shape), ours[name].shape
        return bool((ours[name].read(*whole) == theirs[name].read(*whole)).all())

    return ours.keys() == theirs.keys() and all(map(same, ours))
