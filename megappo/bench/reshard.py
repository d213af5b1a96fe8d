"""The weight sync between CPU processes against whole tensors gathered and broadcast, and against bare messages."""

from __future__ import annotations

import multiprocessing
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from operator import truediv
from random import Random
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from megappo.bench.reshard_ways import BareMessages, GatherThenBroadcast, make_params, own_boxes
from megappo.bench.table import BenchError, Row, show
from megappo.layout.mesh import Layout
from megappo.models.spec import ModelSpec
from megappo.reshard.actor_to_rollout import Meeting, Receipt, TransferSpec
from megappo.reshard.endpoint import Endpoint
from megappo.reshard.gloo import host_store
from megappo.reshard.transfer import BUCKET_BYTES
from megappo.reshard.verify import Verifier

LAYERS = {"250mb": 8, "1gb": 40}
"""Llama-shaped, in bfloat16: 124 and 487 million weights."""

SIZES = tuple(LAYERS)
ROUNDS = 20
LIMIT_S = 120.0
LAYOUTS = (
    ("TP4 x PP2 -> TP4", Layout(tp=4, pp=2), 1, 4),
    ("TP2 x PP2 x DP2 -> 2 x TP2", Layout(tp=2, pp=2, dp=2), 2, 2),
    ("PP4 -> 2 x TP2", Layout(pp=4), 2, 2),
)
WAYS = ("ours, unverified", "ours", "ours, gloo", "gather, broadcast", "bare messages")


def run(size: str, folder: str, out: str | None) -> None:
    """Measure all ways in the same processes, in rounds.

    Each round takes them in another order: what ran just before leaves memory and links warm, for some more than for
    others. The best round of each counts (``s``, ``s / bare``); beside it is the median of what each round took against
    its own bare messages, as a machine is not equally fast all the time.

    The memory that a sync takes beyond the parameters is read from the kernel's peak of each process's resident set
    over its first sync (pages of a sender's ring count for the sender only).

    Args:
        folder: not used: weights are made in memory.

    Raises:
        BenchError: weights did not arrive, or more was sent than has to be.
    """
    for name, actor, engines, tp in LAYOUTS:
        rows = measure(transfer_of(LAYERS[size], actor, engines, tp))
        show(f"reshard {name}, {size}", rows, out)


def transfer_of(layers: int, actor: Layout, engines: int, tp: int) -> TransferSpec:
    """A sync of the model with so many layers on one host, every rank a device of its own."""
    model = ModelSpec(
        family="llama",
        num_layers=layers,
        hidden_size=1024,
        num_heads=16,
        num_kv_heads=4,
        head_dim=64,
        ffn_hidden_size=2816,
        vocab_size=16384,
        max_positions=4096,
        norm_eps=1e-5,
        rope_theta=1e4,
        rope_scaling=None,
        tied_embeddings=False,
    )
    places = tuple(("here", str(rank)) for rank in range(actor.world + engines * tp))
    return TransferSpec(model, actor, engines, tp, fused_norms=False, places=places, forward=True)


def measure(transfer: TransferSpec, rounds: int = ROUNDS) -> list[Row]:
    """One row a way."""
    answers = _on_all_ranks(transfer, rounds)
    workers = answers[transfer.actor.world :]
    least = transfer.elements() * torch.bfloat16.itemsize
    seconds = {way: min(answers[0]["seconds"][way]) for way in WAYS}
    if any(worker["held"] != worker["held then"] or not worker["differs"] for worker in workers):
        raise BenchError("weights did not arrive as when gathered and broadcast")
    rows: list[Row] = []
    for way in WAYS:
        received = sum(answer["received"][way] for answer in answers)
        if way.startswith("ours") and received != least:
            raise BenchError(f"{way}: {received} bytes were received, where {least} are needed")
        row: dict[str, float | str] = {"way": way, "MB": received / 1e6, "bytes / least": received / least}
        row |= {"s": seconds[way], "GB/s": least / seconds[way] / 1e9, "s / bare": seconds[way] / seconds[WAYS[-1]]}
        row["median s / bare"] = median(map(truediv, *(answers[0]["seconds"][of] for of in (way, WAYS[-1]))))
        row["gathered s / s"] = seconds["gather, broadcast"] / seconds[way]
        for side, ranks in (("send", answers[: transfer.actor.world]), ("receive", workers)):
            if way in ("ours", "ours, gloo"):
                row[f"{side} extra / bucket"] = max(rank["extra"][way] for rank in ranks) / BUCKET_BYTES
        if way in answers[0]["proof"]:
            proof, work = (sum(answer[what][way] for answer in answers) for what in ("proof", "work"))
            row["proof, % of CPU"] = 100 * proof / work
        rows.append(row)
    return rows


def _rank(rank: int, transfer: TransferSpec, rounds: int, ports: tuple[int, ...], pipe: Connection) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", ports[0], is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=transfer.world)
    sends = rank < transfer.actor.world
    params = make_params(own_boxes(transfer, rank), torch.bfloat16, values=sends)
    meeting = Meeting("127.0.0.1", ports[1], LIMIT_S)
    ours = Measured(transfer, rank, params, meeting)
    slower = Measured(replace(transfer, places=()), rank, params, replace(meeting, port=ports[2]))
    gathered = GatherThenBroadcast(transfer, rank, torch.bfloat16)
    answer: dict[str, Any] = {"seconds": {way: [] for way in WAYS}, "received": {}, "extra": {}}

    answer["differs"] = sends or any(not param.any() for param in params.values())
    for way, endpoint in (("ours", ours), ("ours, gloo", slower)):  # the first sync of each, proven as a whole
        dist.barrier()
        answer["extra"][way] = _extra_memory(partial(_checked, endpoint, params), sends)
        endpoint.work_s = endpoint.proof_s = 0.0
        answer["held"] = _digests(params)
        for param in params.values() if not sends else ():
            param.zero_()
    gathered(params)
    answer["held then"] = _digests(params)

    bare = BareMessages(rank, ours.part, torch.bfloat16)
    sample, off = ours.verifier, Verifier(rank, ours.part, "off")
    ways: Mapping[str, Callable[[int], int]] = {
        "ours, unverified": lambda version: ours.sync(version, params).received,
        "ours": lambda version: ours.sync(version, params).received,
        "ours, gloo": lambda version: slower.sync(version, params).received,
        "gather, broadcast": lambda _: gathered(params),
        "bare messages": lambda _: bare(params),
    }
    bare(params)
    for version in range(2, rounds + 2):
        for name, sync in Random(version).sample(list(ways.items()), len(ways)):
            ours.verifier = off if name == "ours, unverified" else sample
            dist.barrier()
            began = time.perf_counter()
            answer["received"][name] = sync(version)
            dist.barrier()
            answer["seconds"][name].append(time.perf_counter() - began)
    answer["work"], answer["proof"] = {}, {}
    for name, endpoint in (("ours", ours), ("ours, gloo", slower)):
        answer["work"][name], answer["proof"][name] = endpoint.work_s, endpoint.proof_s
    pipe.send(answer)
    pipe.recv()


class Measured(Endpoint):
    """Counts the processor time of the syncs that it verifies: all of it, all threads together, and the proof's, which
    are checksums and their exchange."""

    work_s = proof_s = 0.0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for part in ("sent_sums", "received_sums"):
            setattr(self.verifier, part, self._counted(getattr(self.verifier, part)))
        self._compare = self._counted(super()._compare)  # type: ignore[method-assign]

    def sync(self, *args: Any, **options: Any) -> Receipt:
        began = time.process_time()
        receipt = super().sync(*args, **options)
        self.work_s += (time.process_time() - began) * (self.verifier.verify != "off")
        return receipt

    def _counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            began = time.thread_time()
            result = method(*args)
            self.proof_s += (time.thread_time() - began) * (self.verifier.verify != "off")
            return result

        return counted


def _checked(endpoint: Endpoint, params: Mapping[str, torch.Tensor]) -> None:
    if complaint := endpoint.sync(1, params).complaint:
        raise BenchError(complaint)


def _digests(params: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return {name: zlib.crc32(param.view(torch.uint8).numpy().data) for name, param in params.items()}


def _extra_memory(work: Callable[[], None], owns_ring: bool) -> int:
    """Bytes by which the resident set rises at most. What others share is left out, unless it is this process's own."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forget the peak
    before = _memory()
    work()
    after = _memory()
    shared = 0 if owns_ring else after["RssShmem"] - before["RssShmem"]
    return after["VmHWM"] - before["VmRSS"] - shared


def _memory() -> dict[str, int]:
    with open("/proc/self/status") as file:
        lines = [line.split() for line in file if line.startswith(("VmHWM", "VmRSS", "RssShmem"))]
    return {name.rstrip(":"): int(value) * 1024 for name, value, _ in lines}


def _on_all_ranks(transfer: TransferSpec, rounds: int) -> list[dict[str, Any]]:
    """What each rank answers, from processes forked off one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    stores = [host_store("127.0.0.1", LIMIT_S) for _ in range(3)]
    ports = tuple(store.port for store in stores)
    pipes, processes = [], []
    for rank in range(transfer.world):
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank, args=(rank, transfer, rounds, ports, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    answers: dict[int, dict[str, Any]] = {}
    try:
        while len(answers) < len(pipes):
            ready = wait_for_any([pipe for rank, pipe in enumerate(pipes) if rank not in answers], 5 * LIMIT_S)
            if not ready:
                raise BenchError(f"ranks {sorted(set(range(len(pipes))) - answers.keys())} do not answer")
            for pipe in ready:
                rank = pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    answers[rank] = pipes[rank].recv()
                except EOFError:
                    raise BenchError(f"rank {rank} died; see above") from None
    finally:
        for process in processes:
            process.kill()
    return [answers[rank] for rank in range(transfer.world)]
