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
from megappo.bench.plain_torch import plain_logprobs
from megappo.bench.ranks import on_ranks
from megappo.bench.table import BenchError
from megappo.config import PPOConfig
from megappo.data import batch
from megappo.layout.legality import megatron_vpp
from megappo.layout.mesh import Layout
from megappo.models.spec import ModelSpec, read_model_spec

SEQUENCES, LENGTH, TOKENS = 16, 96, 512
RATE = 1e-5
LOSES = 1.5
"""Times as far from float32 as plain torch a layout may come, in log-probabilities: both round, at other places."""

STEADY = 0.02
"""Share by which the loss and the gradient's norm may differ from one rank's. Adam's step would hide a wrong factor."""

ROUNDING = 5e-5
"""Nats that a log-probability may at least lose to rounding."""

Numbers = dict[str, Any]
Scores = dict[int, np.ndarray]
"""Log-probabilities of each row's response, by the row's id."""


def measure(model: Path, world: int) -> list[dict[str, float | str]]:
    """One row a layout.

    Raises:
        BenchError: a layout gives other numbers.
    """
    chosen = list(layouts(world, read_model_spec(model)))
    ((alone, exact, plain),) = on_ranks(1, run_alone, str(model))
    found = on_ranks(world, run_layouts, str(model), chosen)
    merged = {"one rank": alone} | {name: _merge([answer[name] for answer in found]) for name in found[0]}
    return [compare(name, numbers, alone, exact, plain) for name, numbers in merged.items()]


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


def run_alone(model: str) -> tuple[Numbers, Scores, Scores]:
    """On one rank: what it computes, and what plain torch does before the update, in float32 and as a role does."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    role = make_role(model, Layout())
    rows, dtype, numbers = _rows(role), role.dtype, _numbers(role)
    del role
    gc.collect()
    exact, plain = (dict(enumerate(plain_logprobs(model, rows, each, device))) for each in (torch.float32, dtype))
    return numbers, exact, plain


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
        answers[layout.describe()] = numbers
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


def compare(name: str, found: Numbers, alone: Numbers, exact: Scores, plain: Scores) -> dict[str, float | str]:
    """A layout's row.

    Before the update, it may be :data:`LOSES` times as far from float32 as plain torch is. So may one rank: after it,
    where nobody knows float32's, the two may be as far apart as the sum.

    Raises:
        BenchError: they are further, or the update's loss or gradient is another.
    """
    row: dict[str, float | str] = {"layout": name}
    lost = _gaps(plain, exact).mean()
    most = LOSES * max(lost, ROUNDING)
    if "before" in found:
        error = _gaps(found["before"], exact).mean()
        row |= {"before update: nats from float32": float(error), "plain torch's": float(lost)}
        if not error < most:
            raise BenchError(f"{name}: {error:.3g} nats from float32, where plain torch is {lost:.3g} from it")
    for moment in (moment for moment in ("before", "after") if moment in found):
        gaps = _gaps(found[moment], alone[moment])
        row |= {f"{moment} update: nats from one rank": float(gaps.mean()), f"{moment}: most": float(gaps.max())}
        if not gaps.mean() < 2 * most:
            raise BenchError(
                f"{name}: {gaps.mean():.3g} nats from one rank, {moment} the update; {lost:.3g} is rounding"
            )
    if "memory" in found and len(found["memory"]) <= torch.cuda.device_count():  # each has a GPU of its own
        row["more outside torch, MiB"] = max(found["memory"].values()) / 2**20
    for stat in ("actor/pg_loss", "actor/grad_norm") if "stats" in found else ():
        row[f"{stat.split('/')[1]} / one rank's"] = ratio = found["stats"][stat] / alone["stats"][stat]
        if not abs(ratio - 1) < STEADY:
            raise BenchError(f"{name}: {stat} is {ratio:.4g} times one rank's")
    return row


def _gaps(found: Scores, wanted: Scores) -> np.ndarray:
    return np.concatenate([np.abs(found[index] - values) for index, values in wanted.items()])


@contextmanager
def _shared_folder() -> Iterator[str]:
    """A temporary folder that all ranks of this host know."""
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names, 0)
    yield names[0]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(names[0])
