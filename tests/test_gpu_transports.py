"""Weights between GPUs over NCCL, and through pinned host memory over gloo."""

from __future__ import annotations

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

TRANSFER = TransferSpec(
    MODEL, Layout(), engines=1, engine_tp=1, fused_norms=False, places=(("here", "0"), ("here", "1")), forward=True
)


def process(rank: int, device: int, meeting: Meeting, pipe: Connection) -> None:
    """Rank 0 sends, rank 1 receives; the receiver reports what it holds after the second sync."""
    from megappo.reshard import endpoint as module

    torch.cuda.set_device(device)
    module.ON_DEVICE = Pace(4 * 50, 4 * 30, in_flight=2)
    params = {name: param.cuda() for name, param in numbered(TRANSFER, rank, 0).items()}
    end = module.Endpoint(TRANSFER, rank, params, meeting)
    mismatches: list[str] = []
    for round_ in (1, 2):
        if rank == 0:
            for name, values in numbered(TRANSFER, rank, round_).items():
                params[name].copy_(values)
        mismatches += end.sync(round_, params).mismatches
    carriers = sorted({type(carrier).__name__ for carrier in end._carriers.values()})
    pipe.send((mismatches, carriers, {name: param.double().cpu().numpy() for name, param in params.items()}))
    pipe.recv()


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_weights_arrive_between_gpus(transport: Any) -> None:
    devices = torch.cuda.device_count()
    if transport == "auto" and devices < 2:
        pytest.skip("NCCL needs two GPUs")
    context = get_context("spawn")  # CUDA does not outlive a fork
    store = host_store("127.0.0.1", 60.0)
    meeting = Meeting("127.0.0.1", store.port, 60.0, verify="full", transport=transport)
    pipes, processes = [], []
    try:
        for rank in range(2):
            ours, theirs = context.Pipe()
            args = (rank, rank % devices, meeting, theirs)
            processes.append(context.Process(target=process, args=args, daemon=True))
            processes[-1].start()
            pipes.append(ours)
        assert all(pipe.poll(120) for pipe in pipes)
        (_, carriers, _), (mismatches, _, held) = (pipe.recv() for pipe in pipes)
    finally:
        for one in processes:
            one.kill()
    assert carriers == (["NcclTransport"] if transport == "auto" else [])
    assert mismatches == []
    for name, values in expected(0, 1).items():
        np.testing.assert_array_equal(held[name], 2 * values, err_msg=name)
