"""The actor's update and log-probability pass against a bare Megatron loop over the same tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from megappo.bench.shapes import make_qwen
from megappo.bench.table import show
from megappo.config import OptimizerConfig, PPOConfig
from megappo.data import batch
from megappo.layout.mesh import Layout


def run(size: str, folder: str, out: str | None, *, sequences: int = 32, length: int = 512, train: bool = True) -> None:
    """Measure: the median of five after two warm-ups, first ours, then bare.

    Args:
        train: include the update, whose optimizer state a large model has no room for.
    """
    from megappo.models.process_groups import init_world, seed_dropout
    from megappo.reshard.gloo import host_store
    from megappo.workers.megatron_role import MegatronRole
    from megappo.workers.objectives import ActorObjective
    from megappo.workers.settings import MiniBatch, RoleSettings, Totals

    on_cuda = torch.cuda.is_available()
    model = make_qwen(Path(folder) / size, size, device="cuda" if on_cuda else "cpu")
    store = host_store("127.0.0.1", 60)
    init_world(0, 1, "127.0.0.1", store.port, 600)
    seed_dropout(0)
    ppo = PPOConfig(mini_batch=sequences, actor_lr=1e-6, critic_lr=1e-6, optimizer=OptimizerConfig())
    rows = _rows(sequences, length)
    tokens = sequences * (length - 1)
    dtype = "bfloat16" if on_cuda else "float32"
    role = MegatronRole(
        RoleSettings(str(model), Layout(), dtype, sequences * length, optimizer=ppo.optimizer if train else None)
    )
    results: dict[str, float] = {}
    results["log-probabilities, ours"] = _median(lambda: role.logprobs(rows, column="logprobs", temperature=1.0))
    mini = MiniBatch(batch.column(rows, "id"), Totals(sequences, tokens))
    if train:
        results["update, ours"] = _median(lambda: role.update(rows, [mini], ActorObjective(ppo, 1.0), 1e-6))
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_cuda else float("nan")

    micro = role._micro_batches(rows, ("logprobs", "advantages"))[0]
    bare = _bare_loss(role)
    role.model.eval()
    with torch.no_grad():
        results["log-probabilities, bare"] = _median(lambda: bare(micro))
    if train:

        def bare_step() -> None:
            role.trained.zero_grad_buffer()
            role.optimizer.zero_grad()
            bare(micro).mean().backward()
            role.model.config.finalize_model_grads_func([role.trained])
            role.optimizer.step()

        role.trained.train()
        results["update, bare"] = _median(bare_step)
    table: list[dict[str, float | str]] = []
    for what in ("log-probabilities", *(["update"] if train else [])):
        ours, plain = tokens / results[f"{what}, ours"], tokens / results[f"{what}, bare"]
        table.append(
            {"size": size, "pass": what, "ours tokens/s": ours, "bare tokens/s": plain, "ours / bare": ours / plain}
        )
    show(f"training {size}", [{**row, "peak GiB, ours": peak} for row in table], out)


def _rows(sequences: int, length: int) -> pa.Table:
    rng, response = np.random.default_rng(0), length - 1
    lengths, total = [response] * sequences, sequences * response
    return pa.table(
        {
            "id": pa.array(range(sequences)),
            "prompt_ids": batch.ragged(rng.integers(0, 1000, sequences).astype(np.int32), [1] * sequences),
            "response_ids": batch.ragged(rng.integers(0, 1000, total).astype(np.int32), lengths),
            "logprobs": batch.ragged(np.full(total, -11.9, np.float32), lengths),
            "advantages": batch.ragged(rng.standard_normal(total).astype(np.float32), lengths),
        }
    )


def _bare_loss(role: Any) -> Callable[[Any], torch.Tensor]:
    """The same model as Megatron itself would run it: whole logits, its own cross-entropy, every token."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    parallel_state.destroy_global_memory_buffer()
    parallel_state.initialize_model_parallel()  # Megatron's cross-entropy knows only its own globals
    model = role.model
    targets: dict[int, torch.Tensor] = {}

    def loss(micro: Any) -> torch.Tensor:
        labels = targets.setdefault(id(micro), micro.input_ids_1t.roll(-1, 1).transpose(0, 1).contiguous())
        hidden = model.decoder(
            hidden_states=model.embedding(micro.input_ids_1t, micro.position_ids_1t),
            attention_mask=None,
            rotary_pos_emb=model.rotary_pos_emb(micro.packed.max_seqlen_q, packed_seq=True),
            packed_seq_params=micro.packed,
        )
        logits = torch.nn.functional.linear(hidden, model.head_weight)
        return vocab_parallel_cross_entropy(logits.float(), labels)

    return loss


def _median(function: Callable[[], Any]) -> float:
    times = []
    for turn in range(7):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if turn >= 2:
            times.append(time.perf_counter() - began)
    return float(np.median(times))
