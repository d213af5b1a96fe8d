"""How a configuration names a reward function: ``package.module[:name]`` or ``file.py[:name]``. Pure."""

from __future__ import annotations

import inspect
import os
from typing import NamedTuple

DEFAULT_NAME = "compute_score"
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")  # each is given by its name
SANDBOX = "sandbox"  # the argument of functions that run code
TOKENS = "response_tokens"  # the argument of functions that reward tokens
CALLABLE = f"it must be callable as {DEFAULT_NAME}({', '.join(ARGUMENTS)})"


class RewardReference(NamedTuple):
    """A reference taken apart. ``location`` is a module's dotted name, or a file's path with ``~`` expanded."""

    location: str
    name: str
    is_file: bool


def signature_problem(signature: inspect.Signature) -> str:
    """Why a function of this signature cannot be called as reward functions are; empty if it can."""
    names = (*ARGUMENTS, *(name for name in (SANDBOX, TOKENS) if name in signature.parameters))
    try:
        signature.bind(**dict.fromkeys(names))
    except TypeError as error:
        return f"takes {signature} ({error}); {CALLABLE}"
    return ""


def parse_reference(text: str) -> RewardReference:
    """What ``text`` names; without a name it is ``compute_score``. Nothing is looked up."""
    location, _, name = text.partition(":")
    is_file = location.endswith(".py") or "/" in location
    return RewardReference(os.path.expanduser(location) if is_file else location, name or DEFAULT_NAME, is_file)


def absolute_reference(text: str) -> str:
    """The same function, named so that it is found from any working directory."""
    reference = parse_reference(text)
    return f"{os.path.abspath(reference.location)}:{reference.name}" if reference.is_file else text
