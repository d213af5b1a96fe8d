"""Carrying out a plan between real processes: values, bytes, memory, proof; peers that die, stall or send garbage."""

from __future__ import annotations

import os
import signal
import time
from collections import UserDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
from ranks import _context, run_ranks

from megappo.layout.mesh import Layout
from megappo.models.spec import ModelSpec
from megappo.reshard.actor_to_rollout import Meeting, TransferSpec
from megappo.reshard.agreement import disagreement
from megappo.reshard.gloo import host_store
from megappo.reshard.messages import make_messages
from megappo.reshard.transfer import Pace, carry_out, find_blocks
from megappo.reshard.transport import in_one_piece, pack

pytestmark = pytest.mark.ranks

MODEL = ModelSpec(
    family="qwen2",
    num_layers=3,
    hidden_size=12,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    ffn_hidden_size=20,
    vocab_size=70,
    max_positions=8,
    norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    tied_embeddings=True,
)
BUCKET = 50
"""Elements, in these tests: the largest block has 70 / 2 rows of 12."""

CASES = {
    "gloo": TransferSpec(MODEL, Layout(tp=2, pp=2), engines=1, engine_tp=2, fused_norms=False),
    "shared memory": TransferSpec(
        MODEL,
        Layout(tp=2, pp=2),
        engines=1,
        engine_tp=2,
        fused_norms=False,
        places=tuple(("here", str(rank)) for rank in range(6)),
    ),
    # Two engines on a node without actors: what comes over the network once is passed on in shared memory.
    "passed on": TransferSpec(
        MODEL,
        Layout(tp=2, dp=2),
        engines=3,
        engine_tp=1,
        fused_norms=False,
        places=(("a", "0"), ("a", "1"), ("b", "0"), ("b", "1"), ("b", "2"), ("c", "0"), ("c", "1")),
        forward=True,
    ),
}
CASES["layer by layer"] = replace(CASES["passed on"], layerwise=True)
CASES["layer by layer, from two stages"] = replace(CASES["gloo"], layerwise=True)


class Staging(UserDict[str, torch.Tensor]):
    """A receiver's parameters, which get their values only when a layer is complete: it is held meanwhile."""

    def __init__(self, params: dict[str, torch.Tensor]) -> None:
        super().__init__(params)
        self.held: dict[str, torch.Tensor] = {}
        self.layers: list[set[str]] = []

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.held.setdefault(name, torch.full_like(self.data[name], -2))

    def install(self) -> None:
        for name, values in self.held.items():
            assert (values >= 0).all()
            self.data[name].copy_(values)
        self.layers.append({".".join(name.split(".")[:3]) for name in self.held})
        self.held = {}


def numbered(transfer: TransferSpec, rank: int, round_: int) -> dict[str, torch.Tensor]:
    """A sender's parameters, each element its global number (times ``round_``); a receiver's, all -1."""
    from megappo.reshard.boxes import megatron_boxes, vllm_boxes
    from megappo.reshard.copies import block
    from megappo.reshard.probe import index_tensors

    sends = rank < transfer.actor.world
    boxes = (
        megatron_boxes(transfer.model, transfer.actor, rank)
        if sends
        else vllm_boxes(transfer.model, transfer.engine_tp, (rank - transfer.actor.world) % transfer.engine_tp, rank)
    )
    whole = dict(index_tensors(transfer.model))
    ends: dict[str, Any] = {}
    for box in boxes:
        ends[box.param] = np.maximum(ends.get(box.param, 0), np.add(box.local_offset, box.size))
    params = {name: torch.full(tuple(end), -1, dtype=torch.float32) for name, end in ends.items()}
    if sends:
        for box in boxes:
            values = round_ * whole[box.name][block(box.offset, box.size)]
            params[box.param][block(box.local_offset, box.size)] = values.float()
    return params


def endpoint(transfer: TransferSpec, rank: int, params: dict[str, torch.Tensor], meeting: Meeting) -> Any:
    """With small buckets."""
    from megappo.reshard import endpoint as module

    module.ON_HOST = Pace(4 * BUCKET, 4 * 30, in_flight=3)
    return module.Endpoint(transfer, rank, params, meeting)


def exchange(transfer: TransferSpec, rounds: int) -> tuple[Any, list[Any], list[dict[str, np.ndarray]], set[str]]:
    """Several syncs over one group: the fingerprint, receipts, what a receiver then holds, and what carried it."""
    import torch.distributed as dist

    rank = dist.get_rank()
    store = host_store("127.0.0.1", 120.0) if rank == 0 else None
    port = [store.port if store else 0]
    dist.broadcast_object_list(port, src=0)
    params = numbered(transfer, rank, 0)
    places = {name: param.data_ptr() for name, param in params.items()}
    end = endpoint(transfer, rank, params, Meeting("127.0.0.1", port[0], 120.0, verify="full"))
    receipts, held = [], []
    for round_ in range(1, rounds + 1):
        if rank < transfer.actor.world:
            for name, values in numbered(transfer, rank, round_).items():
                params[name].copy_(values)
        staging = Staging(params) if transfer.layerwise and rank >= transfer.actor.world else None
        receipts.append(end.sync(round_, staging or params, staging))
        if staging:
            layers = [{f"model.layers.{layer}"} for layer in range(transfer.model.num_layers)]
            assert staging.layers == [{"model.embed_tokens.weight"}, *layers, {"model.norm.weight"}]
        held.append({name: param.double().numpy().copy() for name, param in params.items()})
    assert all(params[name].data_ptr() == place for name, place in places.items())  # the storage is kept
    dist.barrier()  # the world's own group works on beside it; and rank 0 holds the store until all are done
    del store
    return end.fingerprint, receipts, held, {type(carrier).__name__ for carrier in end._carriers.values()}


def expected(worker: int, tp: int) -> dict[str, np.ndarray]:
    """A worker's parameters cut out of the numbered model by vLLM's layout, written out."""
    from megappo.reshard.probe import index_tensors

    hf = {name: tensor.double().numpy() for name, tensor in index_tensors(MODEL)}
    out = {"model.norm.weight": hf["model.norm.weight"]}
    rows = 128 // tp  # padded
    out["model.embed_tokens.weight"] = hf["model.embed_tokens.weight"][rows * worker : rows * (worker + 1)]
    for layer in range(MODEL.num_layers):
        at = f"model.layers.{layer}."
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            out[at + norm] = hf[at + norm]
        for kind in ("weight", "bias"):
            stack = [np.split(hf[f"{at}self_attn.{x}_proj.{kind}"], tp)[worker] for x in "qkv"]
            out[f"{at}self_attn.qkv_proj.{kind}"] = np.concatenate(stack)
        gate_up = [np.split(hf[f"{at}mlp.{x}_proj.weight"], tp)[worker] for x in ("gate", "up")]
        out[f"{at}mlp.gate_up_proj.weight"] = np.concatenate(gate_up)
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            out[at + name] = np.split(hf[at + name], tp, axis=1)[worker]
    return out


@pytest.mark.parametrize("transfer", CASES.values(), ids=CASES)
def test_weights_arrive_whole_and_nothing_else_is_sent(transfer: TransferSpec) -> None:
    rounds = 2
    results = run_ranks(transfer.world, exchange, transfer, rounds)
    assert disagreement({rank: mark for rank, (mark, *_) in enumerate(results)}) is None
    for rank, (_, receipts, held, _) in enumerate(results):
        assert [receipt.mismatches for receipt in receipts] == [()] * rounds
        if rank < transfer.actor.world:
            assert [receipt.received for receipt in receipts] == [0] * rounds
            continue
        wanted = expected((rank - transfer.actor.world) % transfer.engine_tp, transfer.engine_tp)
        for round_, params in enumerate(held, start=1):
            assert params.keys() == wanted.keys()
            for name in wanted:
                np.testing.assert_array_equal(params[name], round_ * wanted[name], err_msg=name)
        assert [r.received for r in receipts] == [4 * sum(values.size for values in wanted.values())] * rounds
    first = [receipts[0] for _, receipts, *_ in results]
    assert sum(receipt.sent for receipt in first) == sum(receipt.received for receipt in first)
    assert min(receipt.sent for receipt in first[: transfer.actor.world]) > 0
    carriers = {name for *_, names in results for name in names}
    assert carriers == (set() if not transfer.places else {"SharedMemory"})
    if transfer.forward:  # node c has the model once from elsewhere, and passes it on
        assert first[5].sent + first[6].sent == 4 * MODEL.num_parameters()
        assert sum(r.sent for r in first[:4]) == 2 * 4 * MODEL.num_parameters()


# --- faults ----------------------------------------------------------------------------------------------------------

SENDERS, RECEIVER = 2, 2
LIMIT_S = 2.0


def small(places: bool) -> TransferSpec:
    """Two senders, one receiver."""
    where = tuple(("here", str(rank)) for rank in range(3)) if places else ()
    return TransferSpec(MODEL, Layout(tp=2), engines=1, engine_tp=1, fused_norms=False, places=where)


class Doomed:
    """A transport whose process meets its fate at its third message."""

    def __init__(self, inner: Any, number: int) -> None:
        self.inner, self.number, self.messages = inner, number, 0
        self.tends, self.finish = inner.tends, inner.finish

    def send(self, *message: Any) -> Any:
        return self._next() or self.inner.send(*message)

    def receive(self, *message: Any) -> Any:
        return self._next() or self.inner.receive(*message)

    def _next(self) -> None:
        self.messages += 1
        if self.messages == 3:
            os.kill(os.getpid(), self.number)


class Flipping:
    """A transport that changes one bit of the third message on its way."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.messages = inner, 0
        self.tends, self.finish = inner.tends, inner.finish

    def receive(self, blocks: Any, source: int, patience: float) -> Any:
        self.messages += 1
        self.blocks = blocks if self.messages == 3 else None
        work, blocks = self.inner.receive(blocks, source, patience), self.blocks

        class Work:
            def wait(self) -> None:
                work.wait()
                if blocks is not None:
                    blocks[0].view(torch.int32).view(-1)[0] ^= 1 << 20

        return Work()


def process(rank: int, transfer: TransferSpec, meeting: Meeting, doomed: int, fate: int, pipe: Connection) -> None:
    """One process that has no group but the transfer's."""
    params = numbered(transfer, rank, 1)
    end = endpoint(transfer, rank, params, meeting)
    store = end._gloo.store
    store.set(f"here/{rank}", "")
    store.wait([f"here/{other}" for other in range(transfer.world)])  # nobody dies before all are connected
    if rank == doomed:
        inner = end._carriers or dict.fromkeys(range(transfer.world), end._gloo)
        wrapper = Doomed(next(iter(inner.values())), fate) if fate else Flipping(next(iter(inner.values())))
        end._carriers = dict.fromkeys(inner, wrapper)
    begin = time.monotonic()
    try:
        outcome = end.sync(1, params).mismatches
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
        del end  # as those who use it do
    pipe.send((outcome, time.monotonic() - begin))
    time.sleep(600)  # the others have its answers, or miss them, first


@contextmanager
def processes(
    transfer: TransferSpec, doomed: int, fate: int, verify: str = "sample", limit_s: float = LIMIT_S
) -> Iterator[list[Connection]]:
    """All ranks of a transfer; one of them is doomed to a signal, or (0) to a changed bit."""
    store = host_store("127.0.0.1", 120.0)
    pipes, started = [], []
    try:
        for rank in range(transfer.world):
            ours, theirs = _context.Pipe(duplex=False)
            meeting = Meeting("127.0.0.1", store.port, limit_s, verify=verify)  # type: ignore[arg-type]
            args = (rank, transfer, meeting, doomed, fate, theirs)
            started.append(_context.Process(target=process, args=args, daemon=True))
            started[-1].start()
            pipes.append(ours)
        yield pipes
    finally:
        for one in started:
            one.kill()


@pytest.mark.parametrize("places", [False, True], ids=["gloo", "shared memory"])
@pytest.mark.parametrize("doomed", [1, RECEIVER], ids=["sender", "receiver"])
@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stalled"])
def test_a_lost_peer_is_named_in_time(fate: int, doomed: int, places: bool) -> None:
    """At once if its process is gone, after the limit on a message if it merely stands still."""
    transfer, killed = small(places), fate == signal.SIGKILL
    limit_s = 10 * LIMIT_S if killed else LIMIT_S  # far beyond what a busy machine takes to hear of a death
    with processes(transfer, doomed, fate, limit_s=limit_s) as pipes:
        answers = {}
        for rank, pipe in enumerate(pipes):
            if rank != doomed and (doomed == RECEIVER or rank == RECEIVER):  # who waits for the doomed one
                assert pipe.poll(100), "hangs"
                answers[rank] = pipe.recv()
    for outcome, took in answers.values():
        assert isinstance(outcome, str), outcome
        assert outcome.startswith(f"TransferError: {transfer.describe(doomed)}"), outcome
        assert ("is gone" if killed else f"within {LIMIT_S:g} s") in outcome
        assert took < limit_s / 2 if killed else LIMIT_S <= took < 20 * LIMIT_S  # it would stand still for good


def test_who_passes_on_what_never_came_is_not_named_first() -> None:
    """Its receivers wait for it, as it waits for the one that stalls."""
    places = tuple((node, str(device)) for node, devices in (("a", 2), ("b", 2), ("c", 4)) for device in range(devices))
    transfer = TransferSpec(
        MODEL, Layout(tp=2, dp=2), engines=2, engine_tp=2, fused_norms=False, places=places, forward=True
    )
    stalled = 2
    with processes(transfer, stalled, signal.SIGSTOP, limit_s=6.0) as pipes:
        answers = [pipe.recv() for rank, pipe in enumerate(pipes) if rank != stalled and pipe.poll(100)]
    failed = sorted((took, outcome) for outcome, took in answers if isinstance(outcome, str))
    assert len(failed) > 2, answers
    assert failed[0][1].startswith(f"TransferError: {transfer.describe(stalled)} sent nothing"), failed


@pytest.mark.parametrize("places", [False, True], ids=["gloo", "shared memory"])
def test_a_changed_bit_is_seen_and_placed(places: bool) -> None:
    transfer = small(places)
    messages = make_messages(transfer.part(RECEIVER), BUCKET, 30, may_be_direct=lambda _: not places)
    message = [m for m in messages if m.destination == RECEIVER][2]
    with processes(transfer, RECEIVER, fate=0, verify="full") as pipes:
        outcomes = [pipe.recv()[0] for pipe in pipes if pipe.poll(100)]
    assert outcomes[:SENDERS] == [(), ()]
    (line,) = outcomes[RECEIVER]
    assert message.copies[0].name in line
    assert transfer.describe(message.source) in line and transfer.describe(RECEIVER) in line


# --- memory ----------------------------------------------------------------------------------------------------------


class Loopback:
    """A transport without wires: counts the messages that are under way, and lets a receiver read what was sent.

    Blocks in one piece are carried without help, as by gloo.
    """

    def __init__(self, mail: list[list[torch.Tensor]]) -> None:
        self.mail, self.flying, self.most = mail, {True: 0, False: 0}, 0

    def finish(self) -> None:
        assert self.flying == {True: 0, False: 0}

    def tends(self, blocks: Any) -> bool:
        return not in_one_piece(blocks)

    def send(self, blocks: Any, to: int, patience: float) -> Any:
        self.mail.append([block.clone() for block in blocks])
        return self._start(blocks)

    def receive(self, blocks: Any, source: int, patience: float) -> Any:
        for block, sent in zip(blocks, self.mail.pop(0), strict=True):
            block.copy_(sent)
        return self._start(blocks)

    def _start(self, blocks: Any) -> Any:
        tends = self.tends(blocks)
        self.flying[tends] += 1
        self.most = max(self.most, self.flying[True])

        class Work:
            def wait(_) -> None:
                self.flying[tends] -= 1

        return Work()


def test_at_most_two_messages_that_take_memory_are_under_way() -> None:
    transfer = TransferSpec(MODEL, Layout(), engines=1, engine_tp=1, fused_norms=False)
    messages = make_messages(transfer.plan(), BUCKET, 30)
    mail: list[list[torch.Tensor]] = []
    weights, copies = numbered(transfer, 0, 1), numbered(transfer, 1, 1)
    for rank, params in enumerate((weights, copies)):
        loopback = Loopback(mail)
        find = partial(find_blocks, rank, params)
        moved = carry_out(rank, messages, 2, find, lambda _, carrier=loopback: carrier)  # type: ignore[misc]
        assert sum(moved) == 4 * MODEL.num_parameters()
        assert loopback.flying == {True: 0, False: 0}
        assert loopback.most == 2
    assert not mail
    for name, values in expected(0, 1).items():
        np.testing.assert_array_equal(copies[name], values, err_msg=name)


# --- replicas --------------------------------------------------------------------------------------------------------


def test_what_replicas_want_is_packed_once_while_it_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over gloo: two ranks get the same columns out of one bucket, and later others out of it, with their values."""
    from megappo.reshard import gloo

    packed: list[int] = []
    monkeypatch.setattr(gloo, "pack", lambda blocks, bucket: packed.append(len(blocks)) or pack(blocks, bucket))
    store = host_store("127.0.0.1", 120.0)
    with ThreadPoolExecutor(3) as pool:
        sender, *receivers = pool.map(
            lambda rank: gloo.GlooTransport("127.0.0.1", store.port, rank, 3, 20.0, 1024), range(3)
        )
    weights = torch.arange(40.0).view(4, 10)
    for turn, (columns, packs) in enumerate([(slice(5), 1), (slice(5), 2), (slice(5, None), 3)]):
        weights += 100 * turn
        found = [torch.zeros(4, 5), torch.zeros(4, 5)]
        works = [receiver.receive([values], 0) for receiver, values in zip(receivers, found, strict=True)]
        works += [sender.send([weights[:, columns]], to) for to in (1, 2)]
        for work in works:
            work.wait()
        assert all(torch.equal(values, weights[:, columns]) for values in found)
        assert len(packed) == packs
    works = [sender.send([weights[:, columns]], 1) for columns in (slice(5), slice(5, None))]  # others: two buckets
    for columns in (slice(5), slice(5, None)):
        receivers[0].receive([found[0]], 0).wait()
        assert torch.equal(found[0], weights[:, columns])
    for work in works:
        work.wait()
    assert len(packed) == 5
