"""Weights between GPUs over NCCL, and through pinned host memory over gloo; processes may share a GPU."""

from __future__ import annotations

import os
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
from test_transfer import MODEL, expected, numbered

from megappo.layout.mesh import Layout
from megappo.reshard.actor_to_rollout import Meeting, TransferSpec
from megappo.reshard.gloo import host_store
from megappo.reshard.transfer import Pace


def transfer_to(engine_tp: int) -> TransferSpec:
    """From one rank to the ranks of an engine, each with a device of its own as far as the plan knows."""
    places = tuple(("here", str(rank)) for rank in range(1 + engine_tp))
    return TransferSpec(MODEL, Layout(), 1, engine_tp, fused_norms=False, places=places, forward=True)


def process(transfer: TransferSpec, rank: int, meeting: Meeting, pipe: Connection) -> None:
    """Rank 0 sends, the others receive, and report what they hold after the second sync."""
    from megappo.reshard import endpoint as module

    devices = torch.cuda.device_count()
    torch.cuda.set_device(rank % devices)
    if transfer.world > devices:  # NCCL takes ranks on one GPU only if they say that they are on several hosts
        os.environ["NCCL_HOSTID"] = str(rank)
    module.ON_DEVICE = Pace(4 * 200, 4 * 30, in_flight=2)  # several messages, of blocks small and large
    params = {name: param.cuda() for name, param in numbered(transfer, rank, 0).items()}
    end = module.Endpoint(transfer, rank, params, meeting)
    mismatches: list[str] = []
    for round_ in (1, 2):
        if rank == 0:
            for name, values in numbered(transfer, rank, round_).items():
                params[name].copy_(values)
        mismatches += end.sync(round_, params).mismatches
    carriers = sorted({type(carrier).__name__ for carrier in end._carriers.values()})
    pipe.send((mismatches, carriers, {name: param.double().cpu().numpy() for name, param in params.items()}))
    pipe.recv()


@pytest.mark.gpu
@pytest.mark.parametrize(("transport", "engine_tp"), [("auto", 1), ("auto", 2), ("gloo", 2)])
def test_weights_arrive_between_gpus(transport: Any, engine_tp: int) -> None:
    context = get_context("spawn")  # CUDA does not outlive a fork
    store = host_store("127.0.0.1", 60.0)
    meeting = Meeting("127.0.0.1", store.port, 60.0, verify="full", transport=transport)
    transfer, pipes, processes = transfer_to(engine_tp), [], []
    try:
        for rank in range(transfer.world):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=process, args=(transfer, rank, meeting, theirs), daemon=True))
            processes[-1].start()
            pipes.append(ours)
        assert all(pipe.poll(120) for pipe in pipes)
        (_, carriers, _), *received = (pipe.recv() for pipe in pipes)
    finally:
        for one in processes:
            one.kill()
    assert carriers == (["NcclTransport"] if transport == "auto" else [])
    for tp_rank, (mismatches, _, held) in enumerate(received):
        assert mismatches == []
        for name, values in expected(tp_rank, engine_tp).items():
            np.testing.assert_array_equal(held[name], 2 * values, err_msg=name)
