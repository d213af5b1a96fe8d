"""Log-probabilities and an update at every layout against one rank's, and two layouts in the same processes."""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megappo.bench import training
from megappo.bench.ranks import on_ranks
from megappo.bench.table import BenchError
from megappo.config import PPOConfig
from megappo.data import batch
from megappo.layout.legality import megatron_vpp
from megappo.layout.mesh import Layout
from megappo.models.spec import ModelSpec, read_model_spec

SEQUENCES, LENGTH, TOKENS = 16, 96, 512
RATE = 1e-5
NEAR = {"bfloat16": 0.02, "float32": 1e-4}
"""Mean difference of a log-probability, in nats, that other orders of summation may make."""

Numbers = dict[str, Any]


def measure(model: Path, world: int) -> list[dict[str, float | str]]:
    """One row a layout.

    Raises:
        BenchError: a layout gives other numbers.
    """
    chosen = list(layouts(world, read_model_spec(model)))
    (alone,) = on_ranks(1, run_layouts, str(model), [Layout()])
    found = on_ranks(world, run_layouts, str(model), chosen)
    merged = {name: _merge([answer[name] for answer in found]) for name in found[0]}
    return [_compare(name, numbers, _merge([alone["1"]])) for name, numbers in merged.items()]


def layouts(world: int, spec: ModelSpec) -> Iterator[Layout]:
    """All ways to split so many ranks: tensor parallelism with and without sequence parallelism, pipelines of one chunk
    a stage and of two."""
    for tp in (size for size in (1, 2, 4, 8) if world % size == 0 and spec.num_kv_heads % size == 0):
        for pp in (size for size in (1, 2, 4, 8) if world // tp % size == 0):
            plain = Layout(tp=tp, pp=pp, dp=world // tp // pp)
            if pp > 1 and 2 in megatron_vpp(spec, pp):
                yield replace(plain, vpp=2)
            yield plain
            if tp > 1:
                yield replace(plain, sequence_parallel=True)


def run_layouts(model: str, chosen: Sequence[Layout]) -> dict[str, Numbers]:
    """On every rank: what each layout computes, then the first and the last as two roles side by side, then one's
    checkpoint in the other. Ranks that report nothing have empty answers."""
    answers: dict[str, Numbers] = {}
    for layout in chosen:
        taken = outside_torch()
        role = make_role(model, layout)
        numbers = _numbers(role)
        if taken:
            numbers["memory"] = {dist.get_rank(): outside_torch() - taken}
        answers[layout.describe() if layout.world > 1 else "1"] = numbers
        del role
        gc.collect()
    if len(chosen) > 1:
        first, last = make_role(model, chosen[0]), make_role(model, chosen[-1])
        before = {**_scores(first, "before"), **_scores(last, "_")}
        pair = f"{chosen[0].describe()}, with {chosen[-1].describe()} in the same processes"
        _update(last)
        answers[pair] = before | _scores(first, "before") | _update(first) | _scores(first, "after")
        with _shared_folder() as folder:
            first.save(folder)
            dist.barrier()
            last.load(folder)
        moved = f"{chosen[0].describe()}, saved and loaded as {chosen[-1].describe()}"
        answers[moved] = _scores(last, "after")
    return answers


def make_role(model: str, layout: Layout) -> Any:
    """The actor at a layout, with its optimizer."""
    return training.make_role(Path(model), TOKENS, layout=layout)


def outside_torch() -> int:
    """Bytes of this process's GPU that torch's allocator does not hold: CUDA's own, and NCCL's for its groups."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def _rows(role: Any) -> Any:
    return training.make_rows(SEQUENCES, 8, LENGTH, vocab_size=role.spec.vocab_size)


def _numbers(role: Any) -> Numbers:
    return {**_scores(role, "before"), **_update(role), **_scores(role, "after")}


def _own_ids(role: Any) -> np.ndarray:
    layout = role.settings.layout
    return np.arange(SEQUENCES)[layout.coordinates(dist.get_rank())["dp"] :: layout.dp]


def _scores(role: Any, name: str) -> Numbers:
    """Log-probabilities of this data-parallel rank's rows, by id; nothing on ranks that do not report."""
    table = role.logprobs(batch.take_ids(_rows(role), _own_ids(role)), column="found", temperature=1.0)
    if table is None:
        return {}
    found = zip(batch.column(table, "id").tolist(), batch.split_rows(table, "found"), strict=True)
    return {name: dict(found)}


def _update(role: Any) -> Numbers:
    from megappo.workers.objectives import ActorObjective
    from megappo.workers.settings import MiniBatch, Totals

    rows = _rows(role)
    totals = Totals(SEQUENCES, int(batch.lengths(rows, "response_ids").sum()))
    ppo = PPOConfig(mini_batch=SEQUENCES, actor_lr=RATE)
    stats = role.update(rows, [MiniBatch(_own_ids(role), totals)], ActorObjective(ppo, 1.0), RATE)
    return {"stats": stats} if stats else {}


def _merge(parts: Sequence[Numbers]) -> Numbers:
    """One table of all data-parallel ranks' rows."""
    out: Numbers = {}
    for part in parts:
        for name, value in part.items():
            out[name] = {**out.get(name, {}), **value}
    return out


def _compare(name: str, found: Numbers, wanted: Numbers) -> dict[str, float | str]:
    row: dict[str, float | str] = {"layout": name}
    for moment in ("before", "after"):
        if moment in found:
            gaps = np.concatenate([np.abs(found[moment][index] - values) for index, values in wanted[moment].items()])
            row |= {f"{moment} update: mean nats": float(gaps.mean()), "max": float(gaps.max())}
            near = NEAR["bfloat16" if torch.cuda.is_available() else "float32"]
            if not gaps.mean() < near:
                raise BenchError(f"{name}, {moment} the update: log-probabilities differ by {gaps.mean():.3g} nats")
    if "memory" in found and len(found["memory"]) <= torch.cuda.device_count():  # each has a GPU of its own
        row["more outside torch, MiB"] = max(found["memory"].values()) / 2**20
    for stat in ("actor/pg_loss", "actor/grad_norm") if "stats" in found else ():
        row[f"{stat.split('/')[1]} / one rank's"] = found["stats"][stat] / wanted["stats"][stat]
    return row


@contextmanager
def _shared_folder() -> Iterator[str]:
    """A temporary folder that all ranks of this host know."""
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names, 0)
    yield names[0]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(names[0])
