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


def transfer_to(engines: int, engine_tp: int, *places: tuple[str, str]) -> TransferSpec:
    """From one rank to those of engines, which are where the plan is told."""
    return TransferSpec(MODEL, Layout(), engines, engine_tp, fused_norms=False, places=places, forward=True)


ONE = transfer_to(1, 1, ("here", "0"), ("here", "1"))
TWO = transfer_to(1, 2, ("here", "0"), ("here", "1"), ("here", "2"))
CASES: dict[str, tuple[TransferSpec, Any, list[str]]] = {
    "one receiver": (ONE, "auto", ["NcclTransport"]),
    "two receivers": (TWO, "auto", ["NcclTransport"]),
    "gloo": (TWO, "gloo", []),
    # What each engine gets from afar, the other gets from it: messages go both ways between them.
    "passed on": (transfer_to(2, 1, ("here", "0"), ("there", "0"), ("there", "1")), "auto", ["NcclTransport"]),
    # One receiver is on the sender's device, where NCCL cannot be.
    "mixed": (
        transfer_to(1, 2, ("here", "0"), ("here", "0"), ("here", "1")),
        "auto",
        ["NcclTransport", "SharedMemory"],
    ),
}
"""The transfer, the transport, and the carriers that a sender then has beside gloo."""


def endpoint(transfer: TransferSpec, rank: int, meeting: Meeting) -> tuple[Endpoint, dict[str, torch.Tensor]]:
    """A rank's, on its GPU; and its parameters."""
    from megappo.reshard import endpoint as module

    devices = torch.cuda.device_count()
    torch.cuda.set_device(int(transfer.places[rank][1]) % devices)
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


def losing(
    transfer: TransferSpec, rank: int, meeting: Meeting, doomed: int, fate: int, at: int, pipe: Connection
) -> None:
    """One of two gets a signal before one of its syncs; the other says what came of it, and uses its GPU again."""
    end, params = endpoint(transfer, rank, meeting)
    for round_ in (1, 2):
        if (rank, round_) == (doomed, at):
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
@pytest.mark.parametrize(("transfer", "transport", "wanted"), CASES.values(), ids=CASES)
def test_weights_arrive_between_gpus(transfer: TransferSpec, transport: Any, wanted: list[str]) -> None:
    store = host_store("127.0.0.1", 60.0)
    meeting = Meeting("127.0.0.1", store.port, 60.0, verify="full", transport=transport)
    with processes(transfer, process, meeting) as pipes:
        assert all(pipe.poll(120) for pipe in pipes)
        (_, carriers, _), *received = (pipe.recv() for pipe in pipes)
    assert carriers == wanted
    for worker, (mismatches, _, held) in enumerate(received):
        assert mismatches == []
        for name, values in expected(worker % transfer.engine_tp, transfer.engine_tp).items():
            np.testing.assert_array_equal(held[name], 2 * values, err_msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("doomed", "at"),
    # Later, a sender need not notice: messages as small as these go into a lost receiver's buffers.
    [(0, 1), (0, 2), (1, 1)],
    ids=["sender before they meet", "sender later", "receiver before they meet"],
)
@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stalled"])
def test_a_lost_peer_is_named_in_time_and_the_gpu_is_free_again(fate: int, doomed: int, at: int) -> None:
    limit_s, store = 8.0, host_store("127.0.0.1", 60.0)
    meeting = Meeting("127.0.0.1", store.port, limit_s, verify="full")
    with processes(ONE, losing, meeting, doomed, fate, at) as pipes:
        assert pipes[1 - doomed].poll(120), "hangs"
        round_, error, took, total = pipes[1 - doomed].recv()
    named = ("actor rank 0 (node here) sent nothing", "engine 0 worker 0 (node here) took nothing")[doomed]
    assert round_ == at and error.startswith(named), error
    assert took < limit_s + 4 and total == 9
