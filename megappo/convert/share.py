"""Work shared among processes that do not talk to each other."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

Item = TypeVar("Item")

OFTEN_S = 0.1
STOPS = (signal.SIGINT, signal.SIGTERM)


class ShareError(RuntimeError):
    """A process that shared the work failed or died."""


def shared(
    work: Callable[[Item], Any],
    items: Sequence[Item],
    sizes: Sequence[int],
    processes: int,
    *,
    meanwhile: Callable[[], None] = lambda: None,
    often: Callable[[], None] = lambda: None,
) -> list[Any]:
    """``[work(item) for item in items]`` by several processes, each with items of about the same size in all.

    Args:
        work: needs no lock: no two items touch the same bytes.
        sizes: of the items, to balance them.
        processes: at most; with one, this process works itself.
        meanwhile: done by this process, while others work.
        often: done again and again by this process, every :data:`OFTEN_S`: while others work, or between items.

    Raises:
        ShareError: a process died.
        Exception: what ``work`` raised, from whichever process.
    """
    processes = min(processes, len(items))
    if processes <= 1:
        meanwhile()
        return list(_one_by_one(work, items, often))
    shares: list[list[int]] = [[] for _ in range(processes)]
    loads = [0] * processes
    for number in sorted(range(len(items)), key=lambda n: -sizes[n]):
        least = loads.index(min(loads))
        shares[least].append(number)
        loads[least] += sizes[number]
    context = multiprocessing.get_context("fork")  # started at once, and what is imported stays shared
    started: list[tuple[Any, Connection]] = []
    try:
        for place, share in enumerate(shares):
            ours, theirs = context.Pipe(duplex=False)
            start = len(share) * place // processes  # each begins elsewhere: a file has one writer at a time
            share = sorted(share)[start:] + sorted(share)[:start]
            readers = [ours, *(reader for _, reader in started)]
            process = context.Process(target=_work, args=(work, items, share, theirs, readers, os.getpid()))
            before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # until it knows what to do of them
            try:
                process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
            started.append((process, ours))
        meanwhile()
        results: dict[int, Any] = {}
        waiting = {ours: process for process, ours in started}
        while waiting:
            ready = wait(list(waiting), OFTEN_S)
            for ours in [ours for ours in waiting if ours in ready]:
                results.update(_received(waiting.pop(ours), ours))
            often()
        return [results[number] for number in range(len(items))]
    finally:
        for process, ours in started:
            process.kill()  # of no effect where it is done
            process.join()
            ours.close()


def _one_by_one(work: Callable[[Item], Any], items: Sequence[Item], often: Callable[[], None]) -> Iterator[Any]:
    last = time.monotonic()
    for item in items:
        yield work(item)
        if time.monotonic() - last >= OFTEN_S:
            often()
            last = time.monotonic()


def _work(
    work: Callable[[Any], Any],
    items: Sequence[Any],
    share: list[int],
    pipe: Connection,
    readers: Sequence[Connection],
    parent: int,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this ends it too
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    for reader in readers:
        reader.close()  # or a pipe that nobody reads any more would be waited for, with the lock held
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    answer: dict[int, Any] | BaseException
    try:
        answer = {}
        for number in share:
            if os.getppid() != parent:
                os._exit(1)  # whoever started this was killed: what it left may be begun again by others
            answer[number] = work(items[number])
    except BaseException as error:
        answer = error
    try:
        pipe.send(answer)
    except BrokenPipeError:
        os._exit(1)


def _received(process: Any, pipe: Connection) -> dict[int, Any]:
    try:
        result = pipe.recv()
    except EOFError:
        process.join()
        raise ShareError(
            f"a process that shared the work died (exit status {process.exitcode}): out of memory? "
            "Give fewer --processes"
        ) from None
    if isinstance(result, BaseException):
        raise result
    return result
