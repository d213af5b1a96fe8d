"""Memory and time of single roles on one GPU, as ``plan`` predicts them, beside what they take there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from megappo.bench import training
from megappo.bench.apart import apart
from megappo.bench.shapes import make_qwen
from megappo.bench.table import BenchError, show
from megappo.config import OptimizerConfig, PPOConfig
from megappo.data import batch
from megappo.fit.devices import CHUNK_BYTES
from megappo.layout.devices import known_profile
from megappo.layout.memory import GIB, RoleMemory, RoleUse, role_memory
from megappo.layout.mesh import Layout
from megappo.layout.passes import PassUse, scoring_phase, update_phase
from megappo.models.parameters import megatron_vocabulary
from megappo.models.spec import ModelSpec, read_model_spec

LENGTH = 512


class Case(NamedTuple):
    """A role and its work: one mini-batch of ``sequences`` of 512 tokens."""

    size: str
    recompute: str = "none"
    trained: bool = True
    scalar_head: bool = False
    sequences: int = 32
    micro_batch_tokens: int = 32 * LENGTH


CASES = {
    "tiny": (Case("tiny"),),
    "0.5b": (Case("0.5b"), Case("0.5b", scalar_head=True), Case("0.5b", sequences=128)),
    "1.5b": (Case("1.5b"), Case("1.5b", "selective"), Case("1.5b", "full"), Case("1.5b", sequences=128)),
    "7b": (Case("7b", trained=False), Case("7b", trained=False, sequences=128)),
}
SIZES = (*CASES, "all")


class Figures(NamedTuple):
    """Peak bytes that torch allocates, and seconds, of scoring and of one update (0 for a role that does not train)."""

    scoring_bytes: int
    scoring_s: float
    update_bytes: int
    update_s: float


def run(size: str, folder: str, out: str | None) -> None:
    """Measure every case in a process of its own.

    Raises:
        BenchError: there is no GPU, or none whose profile is known.
    """
    device = known_profile(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    if device is None:
        raise BenchError("bench predicted compares with a GPU of a known kind (megappo/layout/devices.py); found none")
    rows: list[dict[str, float | str]] = []
    for name in [name for name in CASES if name != "tiny"] if size == "all" else [size]:
        model = make_qwen(Path(folder) / name, name, device="cuda")
        spec = read_model_spec(model)
        for case in CASES[name]:
            seen = apart(measure, model, case)
            told, sequences = memory_of(spec, case), case.sequences
            use = _pass_use(spec, case)
            seconds = scoring_phase(spec, Layout(), use, device, sequences).seconds
            rows.append(_row(case, "scoring", told.weights + _state(told) + told.scoring, seen[0], seconds, seen[1]))
            if case.trained:
                phase = update_phase(spec, Layout(), use, device, sequences, mini_batch=sequences, epochs=1)
                need = told.weights + _state(told) + told.activations + told.backward
                rows.append(_row(case, "update", need, seen[2], phase.seconds, seen[3]))
    show("predicted and measured", rows, out)


def memory_of(spec: ModelSpec, case: Case) -> RoleMemory:
    """As ``plan`` has it."""
    tokens = case.sequences * (LENGTH - 1)
    use = RoleUse(
        vocabulary=megatron_vocabulary(spec.vocab_size, 1),
        item_bytes=2,
        trained=case.trained,
        scalar_head=case.scalar_head,
        tokens=min(tokens, case.micro_batch_tokens),
        micro_batches=-(-tokens // case.micro_batch_tokens),
        recompute=case.recompute,
        chunk_bytes=CHUNK_BYTES,
    )
    return role_memory(spec, Layout(), 0, use)


def measure(model: Path, case: Case) -> Figures:
    """On the GPU: medians and peaks of a role alone."""
    from megappo.workers.megatron_role import MegatronRole
    from megappo.workers.objectives import ActorObjective, CriticObjective
    from megappo.workers.settings import MiniBatch, RoleSettings, Totals

    training.join_alone()
    optimizer = OptimizerConfig() if case.trained else None
    settings = RoleSettings(
        str(model), Layout(), "bfloat16", case.micro_batch_tokens, case.scalar_head, optimizer, recompute=case.recompute
    )
    role = MegatronRole(settings)
    rows = training.make_rows(case.sequences, 1, LENGTH, vocab_size=role.spec.vocab_size)
    for name in ("values", "returns"):
        rows = rows.append_column(name, rows["advantages"])
    mini = MiniBatch(batch.column(rows, "id"), Totals(case.sequences, case.sequences * (LENGTH - 1)))
    ppo = PPOConfig(mini_batch=case.sequences, actor_lr=1e-6, critic_lr=1e-6)
    objective = CriticObjective(ppo) if case.scalar_head else ActorObjective(ppo, 1.0)

    def score() -> None:
        if case.scalar_head:
            role.values(rows)
        else:
            role.logprobs(rows, column="found", temperature=1.0)

    def update() -> float:
        metrics = role.update(rows, [mini], objective, 1e-6)
        assert metrics is not None  # one rank alone reports
        return metrics[f"perf/max_memory_allocated_gb/{'critic' if case.scalar_head else 'actor'}"]

    updating = _timed(update) if case.trained else (0, 0.0)  # before scoring: Adam's moments come with its first step
    return Figures(*_timed(score), *updating)


def _timed(function: Callable[[], float | None]) -> tuple[int, float]:
    """Peak bytes and median seconds of a call, after first ones that make lasting buffers.

    Args:
        function: it gives its peak in GiB if it has started torch's count of it anew.
    """
    training.median(function, warm_ups=1, repeats=1)
    torch.cuda.reset_peak_memory_stats()
    peaks: list[float] = []
    seconds = training.median(lambda: peaks.append(function() or 0.0), warm_ups=1, repeats=5)
    return max(int(max(peaks) * GIB), torch.cuda.max_memory_allocated()), seconds


def _state(memory: RoleMemory) -> int:
    return memory.gradients + memory.optimizer


def _pass_use(spec: ModelSpec, case: Case) -> PassUse:
    return PassUse(
        vocabulary=megatron_vocabulary(spec.vocab_size, 1),
        item_bytes=2,
        scalar_head=case.scalar_head,
        recompute=case.recompute,
        micro_batch_tokens=case.micro_batch_tokens,
        length=LENGTH - 1,
        head_tokens=LENGTH - 1,
    )


def _row(case: Case, work: str, told: int, seen: int, told_s: float, seen_s: float) -> dict[str, float | str]:
    kind = {"model": case.size, "role": "critic" if case.scalar_head else "actor" if case.trained else "frozen"}
    kind |= {"recompute": case.recompute, "work": f"{work} {case.sequences} x {LENGTH}"}
    memory = {"predicted GiB": told / GIB, "measured GiB": seen / GIB, "GiB ratio": told / seen}
    return {**kind, **memory, "predicted s": told_s, "measured s": seen_s, "s ratio": told_s / seen_s}
