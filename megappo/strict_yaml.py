"""Frozen dataclasses from YAML, strictly: every key known, every value of its type and range, all problems at once.

A dataclass is its own schema. Fields are declared with :func:`key`, which carries the help text and the legal range;
types may be ``bool``, ``int``, ``float``, ``str``, ``Literal``, ``T | None``, ``tuple[T, ...]``, ``Mapping[str, T]``
and other such dataclasses.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml


def key(
    help: str,
    default: Any = MISSING,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> Any:
    """A dataclass field with a help line and, for numbers, a legal range. Without ``default`` it is required."""
    metadata = {"help": help, "range": Range(above, at_least, below, at_most)}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Range:
    """The legal numbers of one field; ``above`` and ``below`` exclude the bound itself."""

    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None

    def __contains__(self, value: float) -> bool:
        return (
            math.isfinite(value)
            and (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.below is None or value < self.below)
            and (self.at_most is None or value <= self.at_most)
        )

    def __str__(self) -> str:
        signs = ((">", self.above), (">=", self.at_least), ("<", self.below), ("<=", self.at_most))
        bounds = [f"{sign} {bound}" for sign, bound in signs if bound is not None]
        return " " + " and ".join(bounds) if bounds else ""


# ---- YAML text to plain values and back --------------------------------------------------------------------------

_SCALARS = (
    ("bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF"),
    ("null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$"), "-+0123456789"),
    (
        "float",
        re.compile(r"^(?:[-+]?(?:[0-9][0-9_]*\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?"
                   r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"),
        "-+0123456789.",
    ),
    ("merge", re.compile(r"^<<$"), "<"),
)  # fmt: skip
"""YAML 1.2's plain scalars: ``1e-6`` is a float, while ``no``, ``010`` and ``1:30`` are the strings they look like."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own name


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own name


for _tag, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, list(_first))


def parse(text: str, problems: list[str]) -> Any:
    """Plain values of a YAML text. Keys given twice and syntax errors are added to ``problems``."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        problems.extend(_duplicates(node, "", set()))
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problems.append(f"{where}{error.problem}: fix the YAML there")
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problems.append(f"not YAML: {str(error).splitlines()[0]}")
    finally:
        loader.dispose()
    return MISSING


def dump(value: Any) -> str:
    """YAML text that :func:`parse` reads back as ``value`` (plain values only)."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True, width=1000)


def _duplicates(node: yaml.Node, path: str, seen: set[int]) -> Iterator[str]:
    if id(node) in seen:  # an alias
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _duplicates(item, f"{path}[{index}]", seen)
    elif isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for name, value in node.value:
            here = _join(path, str(name.value))
            line = name.start_mark.line + 1
            if here in lines:
                yield f"{here}: given twice, on lines {lines[here]} and {line}: keep one"
            lines.setdefault(here, line)
            yield from _duplicates(value, here, seen)


# ---- Plain values to dataclasses and back --------------------------------------------------------------------------


class Reader:
    """Builds dataclasses from plain values, collecting every problem on the way.

    Attributes:
        problems: one line a problem, ``key: value, why: fix``.
        doubtful: the keys whose value could not be taken, and those that an unknown key was perhaps meant to be.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.doubtful: set[str] = set()

    def section(self, cls: type, raw: Any, path: str = "") -> Any:
        """An instance of dataclass ``cls``, or ``MISSING`` if a required key has no usable value.

        A refused value of an optional key is reported and left at its default, so that reading can go on.
        """
        raw = {} if raw is None else raw
        if not isinstance(raw, Mapping):
            return self._refuse(path, raw, expected(cls))
        schema = fields_of(cls)
        for name in raw:
            if name not in schema:
                self._unknown(name, schema, path)
        values = {}
        complete = True
        for name, (hint, item) in schema.items():
            here = _join(path, name)
            value: Any = MISSING
            if name in raw:
                value = self.value(hint, raw[name], here, item)
            elif is_required(item):
                wanted = expected(hint, item.metadata["range"])
                self._problem(here, f"missing: give {wanted} ({item.metadata['help']})")
            if value is not MISSING:
                values[name] = value
            elif is_required(item):
                complete = False
        return cls(**values) if complete else MISSING

    def value(self, hint: Any, raw: Any, path: str, item: dataclasses.Field[Any]) -> Any:
        """``raw`` as type ``hint``, or ``MISSING``."""
        legal: Range = item.metadata["range"]
        members = get_args(hint)
        if _is_optional(hint):
            if raw is None:
                return None
            hint = next(member for member in members if member is not type(None))
            members = get_args(hint)
        if dataclasses.is_dataclass(hint):
            return self.section(hint, raw, path)  # type: ignore[arg-type]
        if get_origin(hint) is tuple:
            raw = [raw] if isinstance(raw, str) else raw
            if not isinstance(raw, list):
                return self._refuse(path, raw, expected(hint), item)
            parts = [self.value(members[0], part, f"{path}[{index}]", item) for index, part in enumerate(raw)]
            return MISSING if MISSING in parts else tuple(parts)
        if get_origin(hint) is Mapping:
            if not isinstance(raw, Mapping):
                return self._refuse(path, raw, expected(hint), item)
            return self._mapping(members[1], raw, path, item)
        reason = _refusal(hint, raw, legal)
        if reason:
            return self._refuse(path, raw, expected(hint, legal), item, reason)
        return float(raw) if hint is float else raw

    def _mapping(self, hint: Any, raw: Mapping[Any, Any], path: str, item: dataclasses.Field[Any]) -> Any:
        out = {}
        for name, part in raw.items():
            if not isinstance(name, str):
                self._problem(path, f"the name {name!r} is {_kind(name)}: put it in quotes")
                continue
            out[name] = self.value(hint, part, _join(path, name), item)
        return MISSING if MISSING in out.values() or len(out) < len(raw) else out

    def _problem(self, path: str, text: str) -> None:
        self.problems.append(f"{path}: {text}" if path else text)
        self.doubtful.add(path)

    def _refuse(
        self, path: str, raw: Any, wanted: str, item: dataclasses.Field[Any] | None = None, reason: str = ""
    ) -> Any:
        meaning = f" ({item.metadata['help']})" if item else ""
        what = "empty" if raw is None else f"{_shorten(repr(raw))} {reason or 'is ' + _kind(raw)}"
        self._problem(path, f"{what}: give {wanted}{meaning}")
        return MISSING

    def _unknown(self, name: Any, schema: Mapping[str, Any], path: str) -> None:
        here = _join(path, str(name))
        near = difflib.get_close_matches(str(name), schema, n=1, cutoff=0.6)
        if near:
            self._problem(here, f"unknown key: did you mean {_join(path, near[0])}?")
            self.doubtful.add(_join(path, near[0]))
        else:
            self._problem(here, f"unknown key: known here are {', '.join(schema)}")


@cache
def fields_of(cls: type) -> dict[str, tuple[Any, dataclasses.Field[Any]]]:
    """Type and field of each key of a dataclass, in order."""
    hints = get_type_hints(cls)
    return {item.name: (hints[item.name], item) for item in dataclasses.fields(cls)}


def is_required(item: dataclasses.Field[Any]) -> bool:
    """Whether a field has no default."""
    return item.default is MISSING and item.default_factory is MISSING


def to_plain(value: Any) -> Any:
    """A dataclass as plain values that :meth:`Reader.section` reads back as an equal one."""
    if dataclasses.is_dataclass(value):
        return {item.name: to_plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: to_plain(part) for name, part in value.items()}
    return [to_plain(part) for part in value] if isinstance(value, tuple) else value


def expected(hint: Any, legal: Range | None = None) -> str:
    """What a value of this type looks like, in words."""
    members = get_args(hint)
    if _is_optional(hint):
        return f"{expected(next(m for m in members if m is not type(None)), legal)}, or null"
    if dataclasses.is_dataclass(hint):
        schema = fields_of(hint)  # type: ignore[arg-type]
        required: Collection[str] = [name for name, (_, item) in schema.items() if is_required(item)]
        return f"a section with {'at least ' if required else ''}{', '.join(required or schema)}"
    if get_origin(hint) is tuple:
        return f"a list, each {expected(members[0], legal)}"
    if get_origin(hint) is Mapping:
        return f"names, each with {expected(members[1], legal)}"
    if get_origin(hint) is Literal:
        return " or ".join(members)
    return {bool: "true or false", int: "an integer", float: "a number", str: "a string"}[hint] + str(legal or "")


def _refusal(hint: Any, raw: Any, legal: Range) -> str:
    """Why a scalar is not a legal value of type ``hint``; empty if it is one."""
    if get_origin(hint) is Literal:
        known = isinstance(raw, str) and raw in get_args(hint)
        return "" if known else "is not known" if isinstance(raw, str) else f"is {_kind(raw)}"
    accepted = (int, float) if hint is float else (hint,)
    if type(raw) not in accepted:
        return f"is {_kind(raw)}"
    if isinstance(raw, str):
        return "" if raw else "is empty"
    return "" if isinstance(raw, bool) or raw in legal else "is out of range"


def _is_optional(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


_KINDS = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", dict: "a mapping", list: "a list"}


def _kind(raw: Any) -> str:
    return _KINDS.get(type(raw), f"a {type(raw).__name__}")


def _shorten(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
