"""Finding reward functions by name, and choosing among them by data source.

A reward function has verl's signature, and is called by keyword:

    compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None)
        -> float | {"score": float, ...more numbers, which are logged}

One that takes `sandbox` as well is given a `megappo.rewards.sandbox.Sandbox`, to run code that the model wrote; one
that takes `response_tokens`, the text of each token of the response (the end-of-text token too), to give each a reward
of its own: `token_scores`, a list of as many numbers, in a dict with or without a `score` for the last token.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from megappo.reward_reference import CALLABLE, SANDBOX, TOKENS, parse_reference, signature_problem
from megappo.rewards.open_sandbox import open_sandbox

RewardFunction = Callable[..., Any]


class RewardError(ValueError):
    """A reward that is not there or cannot be called; the message names what was looked for and the fix."""


class RewardTable:
    """Chooses the reward function of a sample by its data source.

    Args:
        function: reference of the function for every source that `by_source` does not name, or None.
        by_source: data_source -> reference.
        sandbox: arguments of `open_sandbox`, which is called once if a function takes a sandbox.

    Raises:
        RewardError: nothing is named, or a reference does not resolve.
        SandboxError: a function takes a sandbox, and there is none here.
    """

    def __init__(self, function: str | None, by_source: Mapping[str, str], sandbox: Mapping[str, Any] | None = None):
        check_named(function, by_source)
        self._sandbox = functools.cache(lambda: open_sandbox(**(sandbox or {})))
        self._for_tokens: set[RewardFunction] = set()
        self._default = None if function is None else self._resolve(function)
        self._by_source = {source: self._resolve(reference) for source, reference in by_source.items()}

    def choose(self, data_source: str) -> RewardFunction:
        """The function for `data_source`; RewardError, naming the sources known, where there is none."""
        check_sources([data_source], self._default is not None, self._by_source)
        return self._by_source.get(data_source, self._default)  # type: ignore[return-value]

    @property
    def rewards_tokens(self) -> bool:
        """Whether some function takes the tokens of a response."""
        return bool(self._for_tokens)

    def takes_tokens(self, reward: RewardFunction) -> bool:
        """Whether this function does."""
        return reward in self._for_tokens

    def _resolve(self, reference: str) -> RewardFunction:
        reward = resolve_reward(reference)
        wanted = _signature(reward).parameters
        with_sandbox = functools.partial(reward, **{SANDBOX: self._sandbox()}) if SANDBOX in wanted else reward
        if TOKENS in wanted:
            self._for_tokens.add(with_sandbox)
        return with_sandbox


def check_named(function: str | None, by_source: Mapping[str, str]) -> None:
    """Raise RewardError unless some function is named."""
    if function is None and not by_source:
        raise RewardError("no reward is named; set roles.reward.function or roles.reward.by_source")


def check_sources(sources: Iterable[str], has_default: bool, by_source: Mapping[str, object]) -> None:
    """Raise RewardError where a data source has no function."""
    unknown = [] if has_default else sorted(set(sources) - set(by_source))
    if unknown:
        raise RewardError(
            f"no reward for data_source {', '.join(map(repr, unknown))}; known: "
            f"{', '.join(map(repr, sorted(by_source)))}; add it to roles.reward.by_source, "
            "or set roles.reward.function for all others"
        )


def resolve_reward(reference: str) -> RewardFunction:
    """The function that `reference` names: `package.module`, `package.module:name`, `file.py` or `file.py:name`.

    Without a name it is `compute_score`. Imports the module.

    Raises:
        RewardError: no such module, file or function; an import that fails; a function with another signature.
    """
    location, name, is_file = parse_reference(reference)
    module = _load_file(reference, Path(location)) if is_file else _load_module(reference, location)
    try:
        function = getattr(module, name)
    except AttributeError:
        own = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
        ]
        raise RewardError(
            f"reward {reference!r}: {location} has no {name!r}; its functions: {', '.join(own) or 'none'}; "
            f"name one as {location}:NAME"
        ) from None
    _check_signature(reference, function)
    return function


def _load_module(reference: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise RewardError(
                f"reward {reference!r}: no module {error.name!r}; install it or add its folder to PYTHONPATH, "
                "write a function inside a module as package.module:name, or name a file as path/to/file.py"
            ) from None
        raise _import_failed(reference, error) from error
    except Exception as error:
        raise _import_failed(reference, error) from error


def _load_file(reference: str, path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise RewardError(f"reward {reference!r}: no file {path}; check the path (a relative one starts here)")
    if path.suffix != ".py":
        raise RewardError(f"reward {reference!r}: {path} is no .py file; name a Python file, or a module with dots")
    # A name of its own, so that two files called reward.py do not meet and none shadows a package.
    name = f"megappo_reward_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # true of every .py file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, Exception):
            raise _import_failed(reference, error) from error
        raise
    return module


def _import_failed(reference: str, error: Exception) -> RewardError:
    return RewardError(f"reward {reference!r}: its import failed with {type(error).__name__}: {error}; fix the module")


def _check_signature(reference: str, function: Any) -> None:
    if not callable(function):
        raise RewardError(f"reward {reference!r}: is {type(function).__name__}, not a function; {CALLABLE}")
    if inspect.iscoroutinefunction(function):
        raise RewardError(f"reward {reference!r}: is async; {CALLABLE} and return the score (use asyncio.run within)")
    if problem := signature_problem(_signature(function)):
        raise RewardError(f"reward {reference!r}: {problem}")


def _signature(function: RewardFunction) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except ValueError:  # some built-in functions tell nothing about themselves
        return inspect.signature(lambda **anything: None)
