"""Call a function in a process of its own, which leaves the device as it was."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

from megappo.bench.table import BenchError


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """What ``function(*args)`` gives in a fresh process.

    Raises:
        BenchError: the process failed.
    """
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=_call, args=(queue, function, args))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise BenchError(f"{function.__name__} ended with status {process.exitcode}")
    return queue.get()


def _call(queue: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    queue.put(function(*args))
