"""What Slurm says of its partitions, where it can be asked."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass

UNLIMITED_S = float("inf")


class SlurmUnavailable(RuntimeError):
    """Slurm is not here, or does not answer."""


@dataclass(frozen=True)
class NodeKind:
    """Nodes of a partition that are alike."""

    count: int
    gpus: int


@dataclass(frozen=True)
class Partition:
    """Attributes: ``limit_s``, the longest that a job may take; ``default``, whether jobs go there by themselves."""

    name: str
    default: bool
    limit_s: float
    kinds: tuple[NodeKind, ...]


def read_partitions() -> dict[str, Partition]:
    """All partitions by name.

    Raises:
        SlurmUnavailable: there is no sinfo on this machine, or Slurm's controller does not answer it.
    """
    if shutil.which("sinfo") is None:
        raise SlurmUnavailable("no sinfo here")
    try:
        done = subprocess.run(
            ["sinfo", "--noheader", "--format=%P|%l|%D|%G"], capture_output=True, text=True, timeout=30
        )
    except subprocess.TimeoutExpired:
        raise SlurmUnavailable("sinfo: no answer within 30 s") from None
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise SlurmUnavailable(said[-1] if said else f"sinfo: exit status {done.returncode}")
    return parse_partitions(done.stdout)


def parse_partitions(text: str) -> dict[str, Partition]:
    """Lines of ``name[*]|time limit|nodes|generic resources``, a line for each kind of nodes."""
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        starred, limit, count, resources = line.strip().split("|")
        name = starred.removesuffix("*")
        kinds = found[name].kinds if name in found else ()
        limit_s = UNLIMITED_S if limit in ("infinite", "n/a") else duration_s(limit)
        kind = NodeKind(int(count), _gpus(resources))
        found[name] = Partition(name, starred != name, limit_s, (*kinds, kind))
    return found


def _gpus(resources: str) -> int:
    """GPUs in a list like ``gpu:h200:8(S:0-1),nvme:1``."""
    plain = re.sub(r"\([^)]*\)", "", resources)
    return sum(int(number) for number in re.findall(r"(?:^|,)gpu(?::[^:,]*)?:(\d+)(?=,|$)", plain))


def duration_s(text: str) -> float:
    """Seconds of a time as Slurm writes it: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S.

    Raises:
        ValueError: it is no such time, or is not longer than 0.
    """
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdecimal() for part in ([days] if dash else []) + parts) or len(parts) > 3:
        raise ValueError(f"{text!r} is no time: write minutes, H:M:S or D-H:M:S, for instance 12:00:00")
    numbers = [int(part) for part in parts]
    if dash or len(numbers) == 3:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    else:
        hours, (minutes, seconds) = 0, (*numbers, 0)[:2]
    total = float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds)
    if not total:
        raise ValueError(f"{text!r} is no time at all: give more than 0")
    return total
