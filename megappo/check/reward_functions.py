"""Reward functions, looked at from outside: their source is parsed, and nothing of the user's runs."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from megappo.reward_reference import CALLABLE, parse_reference, signature_problem


def reward_problems(function: str) -> Iterator[str]:
    """Whether ``package.module[:name]`` or ``file.py[:name]`` exists and defines the name; nothing is imported."""
    target, name, is_file = parse_reference(function)
    if is_file:
        path: Path | None = Path(target)
        if not Path(target).is_file():
            yield f"{function}: there is no file {target}: give file.py:name or package.module:name"
            return
    else:
        try:
            path = _module_file(target)
        except LookupError as error:
            yield f"{function}: {error}: give package.module:name or file.py:name"
            return
    if path is None or path.suffix != ".py":  # compiled: its names cannot be read
        return
    try:
        body = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError, OSError) as error:
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        yield f"{function}: {path}{where} is not valid Python: fix it"
        return
    names = [*_defined(body)]
    if name not in names and "*" not in names:
        public = sorted(known for known in set(names) if not known.startswith("_"))
        yield f"{function}: {path} does not define {name}: it defines {', '.join(public) or 'nothing'}"
    if names.count(name) == 1 and (problem := _call_problem(body, name)):
        yield f"{function}: {problem}"


def _call_problem(body: list[ast.stmt], name: str) -> str:
    """Why the function that a module defines under this name cannot be called; empty if it can, or may be able to.

    A decorator may change the arguments, so that nothing is said of a function that has one.
    """
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    node = next((node for node in body if isinstance(node, kinds) and node.name == name), None)
    if node is None or node.decorator_list:
        return ""
    if isinstance(node, ast.AsyncFunctionDef):
        return f"is async; {CALLABLE} and return the score (use asyncio.run within)"
    return signature_problem(_signature(node))


def _signature(node: ast.FunctionDef) -> inspect.Signature:
    """The arguments of a definition, and which of them have defaults, as ``inspect.signature`` has them."""
    given, kind = node.args, inspect.Parameter
    places: list[tuple[Any, str]] = [(kind.POSITIONAL_ONLY, each.arg) for each in given.posonlyargs]
    places += [(kind.POSITIONAL_OR_KEYWORD, each.arg) for each in given.args]
    required = len(places) - len(given.defaults)
    found = [
        kind(argument, place, default=kind.empty if at < required else None)
        for at, (place, argument) in enumerate(places)
    ]
    if given.vararg:
        found.append(kind(given.vararg.arg, kind.VAR_POSITIONAL))
    for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        found.append(kind(each.arg, kind.KEYWORD_ONLY, default=kind.empty if default is None else None))
    if given.kwarg:
        found.append(kind(given.kwarg.arg, kind.VAR_KEYWORD))
    return inspect.Signature(found)


def reward_takes(function: str, argument: str) -> bool:
    """Whether the definition of a reward function has such an argument; false where it cannot be read."""
    return any(argument in names for names in _arguments(function))


def reward_lacks(function: str, argument: str) -> bool:
    """Whether the definition of a reward function has no such argument; false where it cannot be read."""
    return bool(found := _arguments(function)) and not any(argument in names for names in found)


def _arguments(function: str) -> list[set[str]]:
    """Those of the definition, or definitions, that the file has at its top level."""
    target, name, is_file = parse_reference(function)
    try:
        path = Path(target) if is_file else _module_file(target)
        body = ast.parse(path.read_bytes()).body if path is not None else []
    except (LookupError, SyntaxError, ValueError, OSError):
        return []
    found = [node.args for node in body if isinstance(node, ast.FunctionDef) and node.name == name]
    return [{each.arg for each in (*arguments.args, *arguments.kwonlyargs)} for arguments in found]


def _module_file(dotted: str) -> Path | None:
    """The file of a module, found without importing its packages (as ``importlib.util.find_spec`` would)."""
    top, *rest = dotted.split(".")
    try:
        spec = importlib.util.find_spec(top) if top else None
    except ValueError:  # a module without a spec, such as __main__
        spec = None
    if spec is None:
        raise LookupError(f"there is no module {top!r} on the Python path")
    for depth, part in enumerate(rest, 1):
        parent = ".".join([top, *rest[: depth - 1]])
        if spec.submodule_search_locations is None:
            raise LookupError(f"module {parent} is no package")
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
        if spec is None:
            raise LookupError(f"package {parent} has no module {part!r}")
    if spec.origin is None:
        raise LookupError(f"{dotted} is a folder without __init__.py")
    return Path(spec.origin)


def _defined(body: list[ast.stmt]) -> Iterator[str]:
    """Names that a module's statements bind at its top level; ``*`` for a star import."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name))
        elif isinstance(node, ast.If | ast.Try | ast.With):
            for block in ("body", "orelse", "finalbody"):
                yield from _defined(getattr(node, block, []))
            for handler in getattr(node, "handlers", []):
                yield from _defined(handler.body)
