"""Run a function on N real ranks: processes forked from a server that has Megatron imported, joined by gloo."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["preload"])


def run_ranks(
    world: int,
    target: Callable[..., Any],
    *args: Any,
    timeout_s: float = 600,
    one_died: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Call ``target(*args)`` on every rank; the results by rank. The first failure ends all, with its traceback.

    ``one_died`` is called between the death of a process and the end of all others.
    """
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(world):
        ours, theirs = _context.Pipe(duplex=False)
        process = _context.Process(target=_rank, args=(rank, world, store.port, theirs, target, args), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    try:
        while len(results) < world:
            ready = wait([p for r, p in enumerate(pipes) if r not in results], max(deadline - time.monotonic(), 0))
            if not ready:
                late = sorted(set(range(world)) - results.keys())
                raise TimeoutError(f"ranks {late} did not finish in {timeout_s} s")
            for pipe in ready:
                rank = pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    ok, value = pipes[rank].recv()
                except EOFError:
                    one_died()
                    raise AssertionError(f"rank {rank} died") from None
                if not ok:
                    raise AssertionError(f"rank {rank} of {world}:\n{value}")
                results[rank] = value
    finally:
        for process in processes:
            process.join(0 if len(results) < world else 10)
            if process.is_alive():
                process.kill()
    return [results[rank] for rank in range(world)]


def _rank(
    rank: int, world: int, port: int, pipe: Connection, target: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    try:
        import torch.distributed as dist

        from megappo.models.process_groups import init_world, leave_world, seed_dropout

        init_world(rank, world, "127.0.0.1", port, timeout_s=300)
        seed_dropout(1)
        pipe.send((True, target(*args)))
        dist.barrier()
        leave_world()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        sys.exit(1)
