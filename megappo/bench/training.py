"""A role's update and scoring pass against a bare Megatron loop over the same tokens, with the same optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
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

SEQUENCES, LENGTH = 32, 512
"""Sequences of one mini-batch, in one micro-batch, and the tokens of each."""


def run(size: str, folder: str, out: str | None, *, optimizer: bool = True) -> None:
    """Measure the actor: the median of five after two warm-ups, first ours, then bare.

    Args:
        optimizer: include the optimizer's step, whose state a large model has no room for.
    """
    from megappo.workers.objectives import ActorObjective
    from megappo.workers.settings import MiniBatch, Totals

    on_cuda = torch.cuda.is_available()
    model = make_qwen(Path(folder) / size, size, device="cuda" if on_cuda else "cpu")
    join_alone()
    role = make_role(model, SEQUENCES * LENGTH, optimizer=optimizer)
    rows, ppo = (
        make_rows(SEQUENCES, 1, LENGTH, vocab_size=role.spec.vocab_size),
        PPOConfig(mini_batch=SEQUENCES, actor_lr=1e-6, critic_lr=1e-6),
    )
    tokens = SEQUENCES * (LENGTH - 1)
    mini = MiniBatch(batch.column(rows, "id"), Totals(SEQUENCES, tokens))
    peaks: list[float] = []

    def update() -> None:
        metrics = role.update(rows, [mini], ActorObjective(ppo, 1.0), 1e-6)
        peaks.append(metrics.get("perf/max_memory_allocated_gb/actor", float("nan")))

    ours = {
        "log-probabilities": median(lambda: role.logprobs(rows, column="logprobs", temperature=1.0)),
        "update": median(update),
    }
    bare = BareLoop(role)
    micros = bare.micro_batches(rows)
    plain = {"log-probabilities": median(lambda: bare.forward(micros)), "update": median(lambda: bare.step([micros]))}
    title = f"training {size}" + ("" if optimizer else " (gradients only: no optimizer)")
    show(
        title,
        [
            {
                "size": size,
                "pass": name,
                "ours tokens/s": tokens / ours[name],
                "bare tokens/s": tokens / plain[name],
                "ours / bare": plain[name] / ours[name],
                "peak GiB, ours": max(peaks),
            }
            for name in ours
        ],
        out,
    )


def join_alone() -> None:
    """Make this process a world of its own."""
    from megappo.models.process_groups import init_world, seed_dropout
    from megappo.reshard.gloo import host_store

    _stores.append(host_store("127.0.0.1", 60))
    init_world(0, 1, "127.0.0.1", _stores[-1].port, 600)
    seed_dropout(0)
    torch.set_num_threads(1)  # as in a run's workers


_stores: list[Any] = []
"""Kept open as long as the process runs."""


def make_role(
    model: Path, micro_batch_tokens: int, *, layout: Layout | None = None, critic: bool = False, optimizer: bool = True
) -> Any:
    """A role that trains, alone or at a layout of this world; without ``optimizer``, steps end with the gradients."""
    from megappo.workers.megatron_role import MegatronRole
    from megappo.workers.optimizer import wrap_for_training
    from megappo.workers.settings import RoleSettings

    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    settings = OptimizerConfig() if optimizer else None
    role = MegatronRole(RoleSettings(str(model), layout or Layout(), dtype, micro_batch_tokens, critic, settings))
    if not optimizer:
        role.model.requires_grad_(True)
        role.trained, role.optimizer = wrap_for_training(role.chunks, role.groups), NoOptimizer()
    return role


class NoOptimizer:
    """Stands for the optimizer where its state has no room; only for what is measured without it."""

    param_groups = ()

    def zero_grad(self) -> None:
        """Nothing is kept here."""

    def step(self) -> tuple[bool, float, None]:
        """As if a step had been taken: (taken, gradient norm, zeros in it)."""
        return True, 0.0, None


class BareLoop:
    """The same model as Megatron itself would run it: whole logits, its own cross-entropy, every token."""

    def __init__(self, role: Any) -> None:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        if not parallel_state.model_parallel_is_initialized():  # Megatron's cross-entropy knows only its own globals
            parallel_state.destroy_global_memory_buffer()
            parallel_state.initialize_model_parallel()
        self.role, self.cross_entropy = role, vocab_parallel_cross_entropy

    def micro_batches(self, rows: pa.Table) -> list[Any]:
        """Packed as the role packs them, in halves where whole logits would not fit beside the activations."""
        from megappo.models.process_groups import device
        from megappo.workers.micro_batch import make_micro_batches

        budget = self.role.settings.micro_batch_tokens
        if torch.cuda.is_available() and not self.role.settings.scalar_head:
            logits = 14 * budget * self.role.spec.vocab_size  # in bfloat16, in float32, and the gradients of both
            free = torch.cuda.get_device_properties().total_memory - torch.cuda.memory_allocated()
            budget = budget if logits < 0.3 * free else budget // 2
        return make_micro_batches(rows, token_budget=budget, multiple=1, columns=(), device=device())

    def forward(self, micros: Sequence[Any]) -> None:
        """One pass without gradients."""
        self.role.model.eval()
        with torch.no_grad():
            for micro in micros:
                self._loss_t(micro)

    def step(self, mini_batches: Sequence[Sequence[Any]]) -> None:
        """One optimizer step for each mini-batch."""
        role = self.role
        role.model.train()
        for micros in mini_batches:
            for chunk in role.trained:
                chunk.zero_grad_buffer()
            role.optimizer.zero_grad()
            for micro in micros:
                self._loss_t(micro).mean().backward()
            role.model.config.finalize_model_grads_func(role.trained)
            role.optimizer.step()

    def _loss_t(self, micro: Any) -> torch.Tensor:
        model = self.role.model
        hidden = model.decoder(
            hidden_states=model.embedding(micro.input_ids_1t, micro.position_ids_1t),
            attention_mask=None,
            rotary_pos_emb=model.rotary_pos_emb(micro.packed.max_seqlen_q, packed_seq=True),
            packed_seq_params=micro.packed,
        )
        if self.role.settings.scalar_head:
            return torch.nn.functional.linear(hidden, model.output_layer.weight).float().square()
        labels = micro.input_ids_1t.roll(-1, 1).transpose(0, 1).contiguous()
        logits = torch.nn.functional.linear(hidden, model.head_weight)
        return self.cross_entropy(logits.float(), labels)


def make_rows(sequences: int, prompt: int, length: int, *, vocab_size: int, seed: int = 0) -> pa.Table:
    """Rows of ``length`` random tokens, ``prompt`` of them the prompt's, with what an update reads at first."""
    rng, response = np.random.default_rng(seed), length - prompt
    lengths, total = [response] * sequences, sequences * response
    return pa.table(
        {
            "id": pa.array(range(sequences)),
            "prompt_ids": batch.ragged(
                rng.integers(0, 1000, sequences * prompt).astype(np.int32), [prompt] * sequences
            ),
            "response_ids": batch.ragged(rng.integers(0, 1000, total).astype(np.int32), lengths),
            "logprobs": batch.ragged(np.full(total, -np.log(vocab_size), np.float32), lengths),
            "advantages": batch.ragged(rng.standard_normal(total).astype(np.float32), lengths),
        }
    )


def median(function: Callable[[], Any], *, warm_ups: int = 2, repeats: int = 5) -> float:
    """Seconds of one call."""
    times = []
    for turn in range(warm_ups + repeats):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if turn >= warm_ups:
            times.append(time.perf_counter() - began)
    return float(np.median(times))
