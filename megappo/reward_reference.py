"""How a configuration names a reward function: ``package.module[:name]`` or ``file.py[:name]``. Pure."""

from __future__ import annotations

import os
from typing import NamedTuple

DEFAULT_NAME = "compute_score"


class RewardReference(NamedTuple):
    """A reference taken apart. ``location`` is a module's dotted name, or a file's path with ``~`` expanded."""

    location: str
    name: str
    is_file: bool


def parse_reference(text: str) -> RewardReference:
    """What ``text`` names; without a name it is ``compute_score``. Nothing is looked up."""
    location, _, name = text.partition(":")
    is_file = location.endswith(".py") or "/" in location
    return RewardReference(os.path.expanduser(location) if is_file else location, name or DEFAULT_NAME, is_file)


def absolute_reference(text: str) -> str:
    """The same function, named so that it is found from any working directory."""
    reference = parse_reference(text)
    return f"{os.path.abspath(reference.location)}:{reference.name}" if reference.is_file else text
