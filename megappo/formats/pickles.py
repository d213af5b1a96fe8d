"""Pickles that name classes and functions of other modules, written and read without importing these."""

from __future__ import annotations

import io
import pickle
from functools import cache
from typing import Any


class _Object:
    """Stands for an object whose class cannot be imported here: what its class is given to restore it."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def __getstate__(self) -> Any:
        return self.state


@cache
def named(path: str) -> Any:
    """Stands for a class or function such as "torch.Size"; called with a state, for an object of the class."""
    module, _, name = path.rpartition(".")
    return type(name, (_Object,), {"__module__": module})


class Call:
    """Stands for what a class or function returns."""

    def __init__(self, path: str, *arguments: Any) -> None:
        self.function, self.arguments = named(path), arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.function, self.arguments


class Persistent(tuple[Any, ...]):
    """Stands for what is not in the pickle itself: how it is found."""


class _Pickler(pickle._Pickler):  # the one in Python: that in C imports all that it names
    def save_global(self, obj: Any, name: str | None = None) -> None:
        self.write(pickle.GLOBAL + f"{obj.__module__}\n{name or obj.__qualname__}\n".encode())  # type: ignore[attr-defined]
        self.memoize(obj)  # type: ignore[attr-defined]

    def persistent_id(self, obj: Any) -> Any:
        return tuple(obj) if isinstance(obj, Persistent) else None


def dumps(value: Any) -> bytes:
    """Pickle a value that may hold the above."""
    out = io.BytesIO()
    _Pickler(out, protocol=2).dump(value)
    return out.getvalue()


def load(unpickler: pickle.Unpickler) -> Any:
    """What a pickle holds.

    Raises:
        pickle.UnpicklingError: it is damaged, which Python says by an exception of whatever kind.
    """
    try:
        return unpickler.load()
    except Exception as error:
        raise pickle.UnpicklingError(repr(error)) from None


class Record:
    """An object of whatever class, as it was read: its fields."""

    def __init__(self, *_: object) -> None:
        """Arguments of the other class are of no interest."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})
