"""Weights from a trainer process to a vLLM engine on the same GPU, against one copy of the same bytes on the device."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from megappo.bench.shapes import make_qwen
from megappo.bench.table import BenchError, show
from megappo.layout.mesh import Layout
from megappo.models.spec import read_model_spec
from megappo.reshard.actor_to_rollout import Meeting, TransferSpec
from megappo.reshard.gloo import host_store

REPEATS = 20


def run(size: str, folder: str, out: str | None) -> None:
    """Measure the median of 20 syncs, and prove that the engine ends up with the trainer's weights.

    The first, apart, is proven whole, whereas the others take a sample; and it maps the trainer's memory.

    Raises:
        BenchError: there is no GPU, or the weights did not arrive.
    """
    if not torch.cuda.is_available():
        raise BenchError("bench sync measures two processes on one GPU: no CUDA device is here")
    from megappo.workers.rollout_engine import RolloutEngine
    from megappo.workers.settings import EngineSettings

    model = make_qwen(Path(folder) / size, size, device="cuda")
    places = (("here", "0"),) * 2
    transfer = TransferSpec(read_model_spec(model), Layout(), engines=1, engine_tp=1, fused_norms=True, places=places)
    engine = RolloutEngine(
        EngineSettings(
            folder=str(model),
            tp=1,
            dtype="bfloat16",
            max_tokens=512,
            max_sequences=16,
            memory_fraction=0.35,
            kv_cache_gib=0.0,
            on_cuda=True,
            sleep="off",
            seed=0,
        )
    )
    store = host_store("127.0.0.1", 120)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    trainer = context.Process(target=_trainer, args=(theirs, str(model), transfer, store.port), daemon=True)
    trainer.start()
    engine.join_transfer(transfer, 0, Meeting("127.0.0.1", store.port, 120))
    shared, sums = ours.recv()
    free, _ = torch.cuda.mem_get_info()
    engine.open_shared({0: shared})
    times = []
    for version in range(1, REPEATS + 1):
        began = time.perf_counter()
        ours.send(version)
        receipt = engine.receive_shared(version, {0: ours.recv()})
        times.append(time.perf_counter() - began)
    extra = free - torch.cuda.mem_get_info()[0]
    if receipt.mismatches:
        raise BenchError(receipt.complaint)
    received = receipt.received
    found = engine.engine.collective_rpc("megappo_checksums")[0]
    if abs(found["model.norm.weight"] - sums["norm"]) > 1e-3 or found["model.embed_tokens.weight"] != sums["embedding"]:
        raise BenchError(f"the engine holds other weights: {found['model.norm.weight']}, not {sums['norm']}")
    copy = device_copy(received)
    sync = sorted(times)[len(times) // 2]
    row: dict[str, float | str] = {
        "size": size,
        "GiB": received / 2**30,
        "sync ms": 1e3 * sync,
        "first ms": 1e3 * times[0],
        "device copy ms": 1e3 * copy,
    }
    show(f"sync {size}", [{**row, "sync / copy": sync / copy, "extra MiB": extra / 2**20}], out)
    ours.send(None)
    trainer.join(30)


def _trainer(pipe: Connection, model: str, transfer: TransferSpec, port: int) -> None:
    from megappo.models.process_groups import init_world, seed_dropout
    from megappo.workers.megatron_role import MegatronRole
    from megappo.workers.settings import RoleSettings
    from megappo.workers.weight_sender import WeightSender

    store = host_store("127.0.0.1", 60)
    init_world(0, 1, "127.0.0.1", store.port, 120)
    seed_dropout(0)
    role = MegatronRole(RoleSettings(model, Layout(), "bfloat16", 512))
    sender = WeightSender(role, transfer, Meeting("127.0.0.1", port, 120))
    for param in role.params.values():
        param.mul_(1.5)  # not what the engine loaded from disk
    torch.cuda.synchronize()
    embedding = role.params["embedding.word_embeddings.weight"][: role.spec.vocab_size]
    sums = {
        "norm": float(role.params["decoder.final_layernorm.weight"].double().sum()),
        "embedding": float(embedding.double().sum()),
    }
    pipe.send((sender.share(), sums))
    while (version := pipe.recv()) is not None:
        pipe.send(sender.sums(version))


def device_copy(size: int) -> float:
    """Seconds of one copy of ``size`` bytes on the device."""
    source, target = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]
