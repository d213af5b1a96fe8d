"""Weights from training devices to other devices: ours, whole tensors gathered and broadcast, and bare messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from megappo.bench.multigpu_layouts import outside_torch
from megappo.bench.ranks import on_ranks
from megappo.bench.reshard_ways import BARE_BYTES, BareMessages, GatherThenBroadcast, make_params, own_boxes
from megappo.bench.shapes import qwen_spec
from megappo.bench.table import BenchError
from megappo.layout.mesh import Layout
from megappo.reshard.actor_to_rollout import Meeting, TransferSpec
from megappo.reshard.endpoint import Endpoint
from megappo.reshard.gloo import host_store

LAYOUTS = {2: (Layout(), 1, 1), 4: (Layout(tp=2), 1, 2), 8: (Layout(tp=2, pp=2), 2, 2)}
"""By number of devices: the actor's layout, engines, and the tensor-parallel size of each."""

WAYS = ("ours", "gather, broadcast", "bare messages")
ROUNDS, LIMIT_S = 7, 300.0

BESIDE_BYTES = BARE_BYTES + (12 << 30)
"""That a device needs beside the weights: for bare messages, for the largest tensor whole, and for CUDA and NCCL."""


def weight_bytes(size: str, world: int) -> int:
    """That the device with the largest part holds, in bfloat16."""
    transfer = _transfer(size, world, fused_norms=True)
    return 2 * max(sum(prod(box.size) for box in own_boxes(transfer, rank)) for rank in range(world))


def measure(size: str, world: int, *, on_cuda: bool) -> list[dict[str, float | str]]:
    """One row a way; the median of all rounds but the first, which makes communicators and buckets. Ours verifies as a
    run does: the first sync whole, then a sample.

    Raises:
        BenchError: weights did not arrive, or more was sent than has to be.
    """
    transfer = _transfer(size, world, fused_norms=on_cuda)
    store = host_store("127.0.0.1", LIMIT_S)
    dtype = torch.bfloat16 if on_cuda else torch.float32
    answers = on_ranks(world, sync_all_ways, transfer, dtype, Meeting("127.0.0.1", store.port, LIMIT_S, "sample"))
    least = transfer.elements() * dtype.itemsize
    if complaints := [answer["complaint"] for answer in answers if answer["complaint"]]:
        raise BenchError("\n".join(complaints))
    if any(answer["sums"]["ours"] != answer["sums"]["gather, broadcast"] for answer in answers):
        raise BenchError("the weights that arrived are not those that were gathered and broadcast")
    seconds = {way: answers[0]["seconds"][way] for way in WAYS}
    rows: list[dict[str, float | str]] = []
    for way in WAYS:
        received = sum(answer["received"][way] for answer in answers)
        if way == "ours" and received != least:
            raise BenchError(f"{received} bytes were received, where {least} are needed")
        row: dict[str, float | str] = {"way": way, "GB": received / 1e9, "bytes / least": received / least}
        row |= {"ms": 1e3 * seconds[way], "first ms": 1e3 * answers[0]["first"][way]}
        row |= {"GB/s": least / seconds[way] / 1e9, "rate / bare": seconds["bare messages"] / seconds[way]}
        row |= {"gathered s / s": seconds["gather, broadcast"] / seconds[way]}
        if on_cuda:
            row["extra MiB a device"] = max(answer["extra"][way] for answer in answers) / 2**20
            row["MiB more outside torch"] = max(answer["outside"][way] for answer in answers) / 2**20
        rows.append(row)
    return rows


def sync_all_ways(transfer: TransferSpec, dtype: torch.dtype, meeting: Meeting) -> dict[str, Any]:
    """On every rank: seconds, bytes received and extra memory of each way (torch's, and outside it, where communicators
    are), and a sum over what was received."""
    from megappo.models.process_groups import device

    rank, where = dist.get_rank(), device()
    sends = rank < transfer.actor.world
    params = make_params(own_boxes(transfer, rank), dtype, sends, where)
    endpoint = Endpoint(transfer, rank, params, meeting)
    ways: Mapping[str, Callable[[int], Any]] = {
        "ours": lambda version: endpoint.sync(version, params),
        "gather, broadcast": _method(GatherThenBroadcast(transfer, rank, dtype, where), params),
        "bare messages": _method(BareMessages(rank, endpoint.part, dtype, where), params),
    }
    out: dict[str, Any] = {"seconds": {}, "first": {}, "received": {}, "extra": {}, "outside": {}, "sums": {}}
    for name, sync in ways.items():
        for param in params.values() if not sends and name != "bare messages" else ():
            param.zero_()
        before, outside = _start_memory(where), outside_torch()
        times = []
        for version in range(ROUNDS):
            taken, out["received"][name] = _timed(sync, version, where)
            times.append(taken)
        out["first"][name], rest = times[0], sorted(times[1:])
        out["seconds"][name] = rest[len(rest) // 2]
        out["extra"][name] = torch.cuda.max_memory_allocated() - before if where.type == "cuda" else 0
        out["outside"][name] = outside_torch() - outside
        out["sums"][name] = {key: float(param.sum(dtype=torch.float64)) for key, param in params.items()}
        if name == "ours":
            receipt = out["received"][name]
            out["complaint"], out["received"][name] = receipt.complaint, receipt.received
    return out


def _transfer(size: str, world: int, *, fused_norms: bool) -> TransferSpec:
    actor, engines, tp = LAYOUTS[world]
    places = tuple(("here", str(rank)) for rank in range(world))
    return TransferSpec(qwen_spec(size), actor, engines, tp, fused_norms=fused_norms, places=places, forward=True)


def _method(way: Callable[[Any], int], params: Any) -> Callable[[int], int]:
    return lambda _: way(params)


def _start_memory(where: torch.device) -> int:
    if where.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _timed(sync: Callable[[int], Any], version: int, where: torch.device) -> tuple[float, Any]:
    """Seconds until all ranks are done, and what it gave here."""
    dist.barrier()
    began = time.perf_counter()
    result = sync(version)
    if where.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    if where.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began, result
