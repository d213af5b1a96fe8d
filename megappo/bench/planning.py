"""Planning at the size of real clusters, on one core: seconds, memory, bytes, and how long the transfer should take."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from typing import Any

from megappo.bench.table import BenchError, Row, show
from megappo.layout.mesh import Layout
from megappo.models.spec import ModelSpec
from megappo.reshard.actor_to_rollout import TransferSpec
from megappo.reshard.explain import Speeds, explain
from megappo.reshard.plan import plan_copies
from megappo.reshard.routes import NETWORK

DEVICES_PER_NODE = 8
BFLOAT16 = 2
"""Bytes of a weight."""

PUBLISHED: Sequence[Row] = (
    {"system": "checkpoint-engine (README)", "model": "Kimi-K2, 1T, FP8", "ranks": "256 H20, TP16", "s": 16.04},
    {
        "system": "Perplexity (blog, 24 Sep 2025)",
        "model": "Kimi-K2, 1T, BF16 to FP8",
        "ranks": "256 to 128",
        "s": 1.3,
    },
)
"""What others have published, for orientation: measured on their clusters, where ours are predictions."""


def dense_405b() -> TransferSpec:
    """Llama 3.1 405B, 1,024 training ranks to 64 engines of 8."""
    model = _model("llama", num_layers=126, hidden_size=16384, num_heads=128, ffn_hidden_size=53248, vocab_size=128256)
    return _transfer(model, Layout(tp=8, pp=16, dp=8), engines=64, engine_tp=8)


def mixture_1t() -> TransferSpec:
    """A mixture of 256 experts in each of 61 layers, 1.04e12 weights, 2,048 training ranks to 32 engines of 32.

    Training has whole experts (etp 1) over 64 ranks of each stage, two copies of each; engines deal out whole experts.
    """
    model = _model(
        "qwen3_moe",
        num_layers=61,
        hidden_size=7168,
        num_heads=64,
        ffn_hidden_size=3072,
        vocab_size=151936,
        num_experts=256,
    )
    return _transfer(model, Layout(tp=8, pp=16, dp=16, ep=64, etp=1), engines=32, engine_tp=32)


CLUSTERS = {"405b": dense_405b, "1t-moe": mixture_1t}
SIZES = ("all", *CLUSTERS)


def run(size: str, folder: str, out: str | None) -> None:
    """Time one rank's part and the whole plan.

    Args:
        size: one of :data:`CLUSTERS`, or ``all``.
        folder: not used: no model is made.

    Raises:
        BenchError: the ranks' parts do not add up to the plan.
    """
    for name in [size] if size in CLUSTERS else list(CLUSTERS):
        transfer = CLUSTERS[name]()
        show(f"planning {name}, a rank's own part", [_own_part(transfer, *who) for who in _some_ranks(transfer)], out)
        show(f"planning {name}, the whole plan", [_whole_plan(transfer)], out)
    show("published transfers of other systems", PUBLISHED, out)


def _own_part(transfer: TransferSpec, who: str, rank: int) -> Row:
    wall, processor = time.perf_counter(), time.process_time()
    part = transfer.part(rank)
    row: dict[str, float | str] = {"rank": f"{who} {rank}"}
    row |= {"s": time.perf_counter() - wall, "core s": time.process_time() - processor}
    moved = [sum(c.elements for c in part if end(c) == rank) for end in (lambda c: c.source, lambda c: c.destination)]
    return {
        **row,
        "copies": len(part),
        "sends GB": moved[0] * BFLOAT16 / 1e9,
        "receives GB": moved[1] * BFLOAT16 / 1e9,
        "peak MiB": _peak_mib(),
    }


def _whole_plan(transfer: TransferSpec) -> Row:
    """Plan for everybody, without keeping the plan, and explain it."""
    sides = transfer.sources(), transfer.destinations()
    wall, processor = time.perf_counter(), time.process_time()
    copies = sum(1 for _ in plan_copies(*sides, transfer.places, forward=transfer.forward))
    row = {"s": time.perf_counter() - wall, "core s": time.process_time() - processor, "copies": copies}
    plan = plan_copies(*sides, transfer.places, forward=transfer.forward)
    told = explain(plan, *sides, transfer.places, item_size=BFLOAT16, speeds=Speeds())
    print("\n".join(told.lines()), flush=True)
    if told.planned != told.least or told.received != told.least_received:
        raise BenchError("the plan moves more than the least there can be")
    return {
        **row,
        "GB between nodes": told.planned[NETWORK] / 1e9,
        "predicted s": sum(told.seconds),
        "peak MiB": _peak_mib(),
    }


def _some_ranks(transfer: TransferSpec) -> list[tuple[str, int]]:
    """The first, a middle and the last of either side: stages with the embedding, with layers only, with the head."""
    senders, world = transfer.actor.world, transfer.world
    ends = (("sender", 0, senders), ("receiver", senders, world))
    return [(who, rank) for who, low, high in ends for rank in (low, (low + high) // 2, high - 1)]


def _transfer(model: ModelSpec, actor: Layout, engines: int, engine_tp: int) -> TransferSpec:
    """Full nodes, trainers' and engines' apart."""
    ranks = range(actor.world + engines * engine_tp)
    places = tuple((f"node{rank // DEVICES_PER_NODE}", str(rank % DEVICES_PER_NODE)) for rank in ranks)
    experts = model.num_experts > 0
    return TransferSpec(model, actor, engines, engine_tp, True, places, forward=True, expert_parallel=experts)


def _model(family: str, **sizes: int) -> ModelSpec:
    fixed: dict[str, Any] = {"num_kv_heads": 8, "head_dim": 128, "max_positions": 131072}
    return ModelSpec(
        family=family, norm_eps=1e-5, rope_theta=5e5, rope_scaling=None, tied_embeddings=False, **{**fixed, **sizes}
    )


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
