"""A function on N ranks that form one world: a process each; where there are GPUs, each has one or a share of one."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any

from megappo.bench.table import BenchError


def on_ranks(world: int, function: Callable[..., Any], *args: Any, limit_s: float = 600.0) -> list[Any]:
    """Call ``function(*args)`` on every rank; the results by rank.

    Raises:
        BenchError: a rank failed (with its traceback), died, or took longer than ``limit_s``.
    """
    from megappo.reshard.gloo import host_store

    store = host_store("127.0.0.1", limit_s)
    devices = _visible_devices()
    context = _starting(on_cuda=bool(devices))
    pipes: dict[Connection, int] = {}
    processes, results = [], {}
    try:
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            device = devices[rank % len(devices)] if devices else ""
            host = str(rank) if len(devices) < world else ""
            call = (rank, world, device, host, store.port, limit_s, theirs, function, args)
            processes.append(context.Process(target=_rank, args=call, daemon=False))  # vLLM starts children
            processes[-1].start()
            theirs.close()
            pipes[ours] = rank
        deadline = time.monotonic() + limit_s
        while pipes:
            ready = wait(list(pipes), max(deadline - time.monotonic(), 0.0))
            if not ready:
                raise BenchError(f"ranks {sorted(pipes.values())} of {world} did not finish within {limit_s:g} s")
            for pipe in [pipe for pipe in pipes if pipe in ready]:
                rank = pipes.pop(pipe)
                try:
                    failure, results[rank] = pipe.recv()
                except EOFError:
                    raise BenchError(f"rank {rank} of {world} died; see above") from None
                if failure:
                    raise BenchError(f"rank {rank} of {world} failed:\n{failure}")
        for process in processes:
            process.join(30)
    finally:
        for process in processes:
            process.kill()
    return [results[rank] for rank in range(world)]


def _starting(*, on_cuda: bool) -> SpawnContext | ForkServerContext:
    """Fresh processes on GPUs, since CUDA does not survive a fork; else forks of one that has imported the most."""
    if on_cuda:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "megappo.workers.megatron_role"])
    return context


def _visible_devices() -> list[str]:
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]


def _rank(
    rank: int,
    world: int,
    device: str,
    host: str,
    port: int,
    limit_s: float,
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = device  # before anything here looks at devices
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if host:  # NCCL takes ranks on one GPU only if they say that they are on several hosts
        os.environ["NCCL_HOSTID"] = host
    try:
        import torch
        import torch.distributed as dist

        from megappo.models.process_groups import init_world, leave_world, seed_dropout

        if not torch.cuda.is_available():
            torch.set_num_threads(1)
        init_world(rank, world, "127.0.0.1", port, limit_s)
        seed_dropout(0)
        result = function(*args)
        dist.barrier()
        pipe.send(("", result))
        leave_world()
    except BaseException:
        pipe.send((traceback.format_exc(), None))
        sys.exit(1)
