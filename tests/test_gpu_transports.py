"""Weights between GPUs over NCCL, and through pinned host memory over gloo; processes may share a GPU."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
from test_transfer import MODEL, expected, numbered

from megappo.layout.mesh import Layout
from megappo.reshard.actor_to_rollout import Meeting, TransferSpec
from megappo.reshard.endpoint import Endpoint
from megappo.reshard.gloo import host_store
from megappo.reshard.transfer import Pace
from megappo.reshard.transport import TransferError


def transfer_to(engine_tp: int) -> TransferSpec:
    """From one rank to the ranks of an engine, each with a device of its own as far as the plan knows."""
    places = tuple(("here", str(rank)) for rank in range(1 + engine_tp))
    return TransferSpec(MODEL, Layout(), 1, engine_tp, fused_norms=False, places=places, forward=True)


def endpoint(transfer: TransferSpec, rank: int, meeting: Meeting) -> tuple[Endpoint, dict[str, torch.Tensor]]:
    """A rank's, on its GPU; and its parameters."""
    from megappo.reshard import endpoint as module

    devices = torch.cuda.device_count()
    torch.cuda.set_device(rank % devices)
    if transfer.world > devices:  # NCCL takes ranks on one GPU only if they say that they are on several hosts
        os.environ["NCCL_HOSTID"] = str(rank)
    module.ON_DEVICE = Pace(4 * 200, 4 * 30, in_flight=2)  # several messages, of blocks small and large
    params = {name: param.cuda() for name, param in numbered(transfer, rank, 0).items()}
    return Endpoint(transfer, rank, params, meeting), params


def process(transfer: TransferSpec, rank: int, meeting: Meeting, pipe: Connection) -> None:
    """Rank 0 sends, the others receive, and report what they hold after the second sync."""
    end, params = endpoint(transfer, rank, meeting)
    mismatches: list[str] = []
    for round_ in (1, 2):
        if rank == 0:
            for name, values in numbered(transfer, rank, round_).items():
                params[name].copy_(values)
        mismatches += end.sync(round_, params).mismatches
    carriers = sorted({type(carrier).__name__ for carrier in end._carriers.values()})
    pipe.send((mismatches, carriers, {name: param.double().cpu().numpy() for name, param in params.items()}))
    pipe.recv()


def losing(transfer: TransferSpec, rank: int, meeting: Meeting, fate: int, at: int, pipe: Connection) -> None:
    """Rank 0 gets a signal before one of its syncs; the other says what came of it, and uses its GPU again."""
    end, params = endpoint(transfer, rank, meeting)
    for round_ in (1, 2):
        if (rank, round_) == (0, at):
            os.kill(os.getpid(), fate)
        began = time.monotonic()
        try:
            end.sync(round_, params)
        except TransferError as error:
            torch.cuda.synchronize()
            pipe.send((round_, str(error), time.monotonic() - began, float(torch.ones(9, device="cuda").sum())))
            break
    pipe.recv()


@contextmanager
def processes(transfer: TransferSpec, target: Any, *args: Any) -> Iterator[list[Connection]]:
    context = get_context("spawn")  # CUDA does not outlive a fork
    pipes, started = [], []
    try:
        for rank in range(transfer.world):
            ours, theirs = context.Pipe()
            started.append(context.Process(target=target, args=(transfer, rank, *args, theirs), daemon=True))
            started[-1].start()
            pipes.append(ours)
        yield pipes
    finally:
        for one in started:
            one.kill()


@pytest.mark.gpu
@pytest.mark.parametrize(("transport", "engine_tp"), [("auto", 1), ("auto", 2), ("gloo", 2)])
def test_weights_arrive_between_gpus(transport: Any, engine_tp: int) -> None:
    store = host_store("127.0.0.1", 60.0)
    meeting = Meeting("127.0.0.1", store.port, 60.0, verify="full", transport=transport)
    with processes(transfer_to(engine_tp), process, meeting) as pipes:
        assert all(pipe.poll(120) for pipe in pipes)
        (_, carriers, _), *received = (pipe.recv() for pipe in pipes)
    assert carriers == (["NcclTransport"] if transport == "auto" else [])
    for tp_rank, (mismatches, _, held) in enumerate(received):
        assert mismatches == []
        for name, values in expected(tp_rank, engine_tp).items():
            np.testing.assert_array_equal(held[name], 2 * values, err_msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize("at", [1, 2], ids=["before they meet", "later"])
@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stalled"])
def test_a_lost_sender_is_named_in_time_and_the_gpu_is_free_again(fate: int, at: int) -> None:
    limit_s, store = 8.0, host_store("127.0.0.1", 60.0)
    meeting, transfer = Meeting("127.0.0.1", store.port, limit_s, verify="full"), transfer_to(1)
    with processes(transfer, losing, meeting, fate, at) as pipes:
        assert pipes[1].poll(120), "hangs"
        round_, error, took, total = pipes[1].recv()
    assert round_ == at and error.startswith("actor rank 0 (node here) sent nothing"), error
    assert took < limit_s + 4 and total == 9
