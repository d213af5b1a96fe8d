"""A device profile by name or from a YAML file with the same fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from megappo.layout.devices import NUMBERS, PROFILES, DeviceProfile
from megappo.strict_yaml import parse


class ProfileError(ValueError):
    """A device profile that cannot be used; ``problems`` lists every reason, each with its fix."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def load_profile(name: str) -> DeviceProfile:
    """A shipped profile by its name, or one from a YAML file.

    Raises:
        ProfileError: neither is there, or the file lacks a number, has one that is none, or a key that is not known.
    """
    if name in PROFILES:
        return PROFILES[name]
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        raise ProfileError([f"{name}: not a device we know: known are {', '.join(PROFILES)}, or give a YAML file"])
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError([f"{name}: cannot be read ({error}): give a YAML file with a device profile"]) from None
    problems: list[str] = []
    raw = parse(text, problems)
    if raw is not MISSING and not isinstance(raw, Mapping):
        problems.append(f"holds no mapping: give {', '.join(NUMBERS)}")
    elif isinstance(raw, Mapping):
        problems += _problems(raw)
    if problems:
        raise ProfileError([f"{name}: {problem}" for problem in problems])
    return DeviceProfile(**{"name": path.stem, **raw})


def _problems(raw: Mapping[Any, Any]) -> Iterator[str]:
    known = {field.name: field for field in fields(DeviceProfile)}
    for key in raw:
        if key not in known:
            yield f"{key}: unknown key: known are {', '.join(known)}"
    for key in NUMBERS:
        value = raw.get(key)
        if key not in raw:
            if known[key].default is MISSING:
                yield f"{key}: missing: give a number > 0"
        elif value is None and known[key].default is None:
            continue
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            yield f"{key}: {value!r} is not a number > 0"
        elif key == "devices_per_node" and not isinstance(value, int):
            yield f"{key}: {value!r} is not an integer > 0"
