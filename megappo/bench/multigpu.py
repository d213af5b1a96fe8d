"""Several GPUs of one host: equal numbers at every layout, speed, weights over NCCL, pools that work together.

On a machine without GPUs the same runs on CPU processes over gloo, to try it.
"""

from __future__ import annotations

from pathlib import Path

import torch

from megappo.bench import multigpu_layouts, multigpu_run, multigpu_scaling, multigpu_sync
from megappo.bench.shapes import add_tokenizer, make_qwen
from megappo.bench.table import BenchError, show

SIZES = ("0.5b", "1.5b", "tiny")
SYNCED = {"0.5b": ("1.5b", "7b", "32b"), "1.5b": ("1.5b", "7b", "32b"), "tiny": ("tiny",)}
"""Shapes whose weights are sent, by the size of the model that is trained, where they fit."""

CPU_RANKS = 2


def run(size: str, folder: str, out: str | None) -> None:
    """Run what the number of GPUs allows (2, 4 or 8 are used), and print a table after each part.

    Raises:
        BenchError: a layout gives other numbers than one rank, weights did not arrive, or only one GPU is here.
    """
    found = torch.cuda.device_count()
    on_cuda = found > 0
    if found == 1:
        raise BenchError("bench multigpu needs two GPUs of one host, and there is one")
    world = next((n for n in (8, 4, 2) if n <= found), CPU_RANKS)
    kind = "GPUs" if on_cuda else "CPU processes"
    model = make_qwen(Path(folder) / size, size, device="cuda" if on_cuda else "cpu")
    add_tokenizer(model)

    def print_part(title: str, rows: list[dict[str, float | str]]) -> None:
        show(f"multigpu, {world} {kind}: {title}", rows, out)

    print_part(f"{size} at every layout, against one rank", multigpu_layouts.measure(model, world))
    print_part(f"update of {size}, tokens/s", multigpu_scaling.measure(model, world, on_cuda=on_cuda))
    for shape in SYNCED[size]:
        if on_cuda and (lack := lacking(shape, world, torch.cuda.get_device_properties(0).total_memory)):
            print(f"weights of {shape} to other devices: left out, {lack}")
            continue
        print_part(f"weights of {shape} to other devices", multigpu_sync.measure(shape, world, on_cuda=on_cuda))
    phases, pools = multigpu_run.measure(model, Path(folder) / f"{size}-multigpu", world, on_cuda=on_cuda)
    print_part("a whole step on separate pools, seconds", phases)
    print_part("how busy each pool was", pools)


def lacking(shape: str, world: int, memory: int) -> str:
    """Why the weights of a shape cannot be sent between devices of so many bytes; empty if they can."""
    needed = multigpu_sync.weight_bytes(shape, world) + multigpu_sync.BESIDE_BYTES
    if needed <= memory:
        return ""
    return f"{needed / 2**30:.0f} GiB a device are needed, and there are {memory / 2**30:.0f}"
