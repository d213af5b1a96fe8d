"""What a rule yields: a line of the form ``key: value, why: fix``, an error unless it is marked as milder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, is_dataclass


class Advice(str):
    """A finding that does not stop a run."""


class Lacking(str):
    """A finding about files that a run needs, and that a plan can do without."""


class Absent(str):
    """A finding about a folder that is not on this machine: what depends on it cannot be known here."""


def on_files(lines: Iterator[str]) -> Iterator[str]:
    """The same findings, marked as being about files."""
    return (line if isinstance(line, Advice) else Lacking(line) for line in lines)


def under(prefix: str, lines: Iterator[str] | Sequence[str], joint: str = ": ") -> Iterator[str]:
    """Findings whose key gets a prefix."""
    return (f"{prefix}{joint}{line}" for line in lines)


def done(steps: int) -> str:
    """How far a run is, in words."""
    return f"{steps} steps are done" if steps != 1 else "1 step is done"


def shown(value: object) -> str:
    """A value as a user would write it."""
    if is_dataclass(value) and not isinstance(value, type):
        return f"{{{', '.join(f'{name}: {shown(part)}' for name, part in asdict(value).items())}}}"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
