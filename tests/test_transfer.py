"""Carrying out a plan between real processes, over gloo: values, bytes, memory, and a peer that dies."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
from ranks import _context, run_ranks

from megappo.layout.mesh import Layout
from megappo.models.spec import ModelSpec
from megappo.reshard.actor_to_rollout import TransferSpec
from megappo.reshard.gloo import host_store
from megappo.reshard.plan import make_messages
from megappo.reshard.transfer import receive_weights, send_weights

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
TRANSFER = TransferSpec(MODEL, Layout(tp=2, pp=2), engines=1, engine_tp=2, fused_norms=False)
SENDERS = TRANSFER.actor.world
BUCKET = 50  # elements: the largest block has 70 / 2 rows of 12


def join(transfer: TransferSpec, timeout_s: float) -> tuple[Any, Any]:
    """A transport among the ranks of the test, and this rank's meeting point, to be kept alive."""
    import torch.distributed as dist

    from megappo.reshard.gloo import GlooTransport, host_store

    rank = dist.get_rank()
    store = host_store("127.0.0.1", timeout_s) if rank == 0 else None
    port = [store.port if store else 0]
    dist.broadcast_object_list(port, src=0)
    return GlooTransport("127.0.0.1", port[0], rank, transfer.world, timeout_s), store


def numbered(transfer: TransferSpec, rank: int, dtype: torch.dtype, round_: int) -> dict[str, torch.Tensor]:
    """A sender's parameters, each element its global number (times ``round_``); a receiver's, all -1."""
    from megappo.reshard.boxes import megatron_boxes, vllm_boxes
    from megappo.reshard.files import block
    from megappo.reshard.probe import index_tensors

    sends = rank < SENDERS
    boxes = (
        megatron_boxes(transfer.model, transfer.actor, rank)
        if sends
        else vllm_boxes(transfer.model, transfer.engine_tp, rank - SENDERS, rank)
    )
    whole = dict(index_tensors(transfer.model))
    ends: dict[str, Any] = {}
    for box in boxes:
        ends[box.param] = np.maximum(ends.get(box.param, 0), np.add(box.local_offset, box.size))
    params = {name: torch.full(tuple(end), -1, dtype=dtype) for name, end in ends.items()}
    if sends:
        for box in boxes:
            values = round_ * whole[box.name][block(box.offset, box.size)]
            params[box.param][block(box.local_offset, box.size)] = values.to(dtype)
    return params


def exchange(dtype: torch.dtype, rounds: int) -> tuple[list[int], list[dict[str, np.ndarray]], set[int]]:
    """Several syncs over one group; bytes and received parameters of each, and the largest tensors ever packed."""
    import torch.distributed as dist

    rank = dist.get_rank()
    transport, store = join(TRANSFER, 20.0)
    messages = make_messages(TRANSFER.plan(), BUCKET)
    moved, received = [], []
    params = numbered(TRANSFER, rank, dtype, 1)
    places = {name: param.data_ptr() for name, param in params.items()}
    for round_ in range(1, rounds + 1):
        if rank < SENDERS:
            moved.append(send_weights(transport, messages, numbered(TRANSFER, rank, dtype, round_)))
        else:
            moved.append(receive_weights(transport, messages, params))
            received.append({name: param.double().numpy().copy() for name, param in params.items()})
    assert all(params[name].data_ptr() == place for name, place in places.items())  # the storage is kept
    dist.barrier()  # the world's own group works on beside it; and rank 0 holds the store until all are done
    del store
    return moved, received, {message.elements for message in messages}


def expected(worker: int) -> dict[str, np.ndarray]:
    """A worker's parameters cut out of the numbered model by vLLM's layout, written out."""
    from megappo.reshard.probe import index_tensors

    hf = {name: tensor.double().numpy() for name, tensor in index_tensors(MODEL)}
    out = {"model.norm.weight": hf["model.norm.weight"]}
    out["model.embed_tokens.weight"] = hf["model.embed_tokens.weight"][64 * worker : 64 * (worker + 1)]  # 128 rows
    for layer in range(MODEL.num_layers):
        at = f"model.layers.{layer}."
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            out[at + norm] = hf[at + norm]
        for kind in ("weight", "bias"):
            stack = [np.split(hf[f"{at}self_attn.{x}_proj.{kind}"], 2)[worker] for x in "qkv"]
            out[f"{at}self_attn.qkv_proj.{kind}"] = np.concatenate(stack)
        gate_up = [np.split(hf[f"{at}mlp.{x}_proj.weight"], 2)[worker] for x in ("gate", "up")]
        out[f"{at}mlp.gate_up_proj.weight"] = np.concatenate(gate_up)
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            out[at + name] = np.split(hf[at + name], 2, axis=1)[worker]
    return out


def test_weights_arrive_whole_and_nothing_else_is_sent() -> None:
    rounds = 2
    results = run_ranks(TRANSFER.world, exchange, torch.float32, rounds)
    assert max(size for _, _, sizes in results for size in sizes) <= BUCKET
    for worker, (moved, received, _) in enumerate(results[SENDERS:]):
        wanted = expected(worker)
        for round_, params in enumerate(received, start=1):
            assert params.keys() == wanted.keys()
            for name in wanted:
                np.testing.assert_array_equal(params[name], round_ * wanted[name], err_msg=name)
        assert moved == [4 * sum(values.size for values in wanted.values())] * rounds
    sent = [moved[0] for moved, _, _ in results[:SENDERS]]
    assert sum(sent) == sum(moved[0] for moved, _, _ in results[SENDERS:])
    assert min(sent) > 0


SMALL = TransferSpec(MODEL, Layout(tp=2), engines=1, engine_tp=1, fused_norms=False)  # two senders, one receiver


def lonely(rank: int, port: int, timeout_s: float, pipe: Connection) -> None:
    """One process of SMALL, with no group but the transfer's. Sender 1 goes silent after its first message."""
    from megappo.reshard.gloo import GlooTransport

    transport = GlooTransport("127.0.0.1", port, rank, SMALL.world, timeout_s)
    messages = make_messages(SMALL.plan(), BUCKET)
    if rank == 1:
        messages = messages[: 1 + next(i for i, message in enumerate(messages) if message.source == 1)]
    params = {c.source_param if rank < 2 else c.param: torch.zeros(128, 64) for m in messages for c in m.copies}
    params = {name: torch.zeros(128) if name.endswith(("bias", "norm.weight")) else p for name, p in params.items()}
    begin = time.monotonic()
    try:
        (send_weights if rank < 2 else receive_weights)(transport, messages, params)
        outcome = "done"
    except RuntimeError as error:
        outcome = str(error)
    pipe.send((outcome, time.monotonic() - begin))
    time.sleep(60)


@pytest.mark.parametrize("fate", ["killed", "silent"])
def test_a_lost_sender_ends_the_receiver_with_an_error(fate: str) -> None:
    """In time: at once if the sender's process is gone, after the limit on a message if it merely says nothing."""
    limit_s = 3.0
    store = host_store("127.0.0.1", 20.0)
    pipes, processes = [], []
    try:
        for rank in range(SMALL.world):
            ours, theirs = _context.Pipe(duplex=False)
            args = (rank, store.port, limit_s, theirs)
            processes.append(_context.Process(target=lonely, args=args, daemon=True))
            processes[-1].start()
            pipes.append(ours)
        assert pipes[1].poll(30) and pipes[1].recv()[0] == "done"
        if fate == "killed":
            processes[1].kill()
        assert pipes[2].poll(limit_s + 10)
        outcome, took = pipes[2].recv()
        assert ("onnection" if fate == "killed" else "Timed out") in outcome, outcome
        assert took < (limit_s - 1 if fate == "killed" else limit_s + 3)
    finally:
        for process in processes:
            process.kill()


class Loopback:
    """A transport without wires: counts the buckets that are in the air, and lets a receiver read what was sent."""

    def __init__(self, rank: int, mail: list[torch.Tensor]) -> None:
        self.rank, self.mail, self.flying, self.most = rank, mail, 0, 0

    def send(self, data: torch.Tensor, to: int) -> Any:
        self.mail.append(data)
        return self._start()

    def receive(self, data: torch.Tensor, source: int) -> Any:
        data.copy_(self.mail.pop(0))
        return self._start()

    def _start(self) -> Any:
        self.flying += 1
        self.most = max(self.most, self.flying)
        return self

    def wait(self) -> None:
        self.flying -= 1


def test_at_most_two_buckets_are_in_the_air() -> None:
    spec = TransferSpec(MODEL, Layout(), engines=1, engine_tp=1, fused_norms=False)
    messages = make_messages(spec.plan(), BUCKET)
    mail: list[torch.Tensor] = []
    weights = {c.source_param: torch.randn(128, 64) for m in messages for c in m.copies if len(c.size) == 2}
    weights |= {c.source_param: torch.randn(128) for m in messages for c in m.copies if len(c.size) == 1}
    copies = {
        c.param: torch.zeros(128, 64) if len(c.size) == 2 else torch.zeros(128) for m in messages for c in m.copies
    }
    for rank, move, params in ((0, send_weights, weights), (1, receive_weights, copies)):
        loopback = Loopback(rank, mail)
        assert move(loopback, messages, params) == 4 * MODEL.num_parameters()  # type: ignore[arg-type]
        assert loopback.flying == 0
        assert loopback.most == 2
    assert not mail
