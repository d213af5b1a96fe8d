"""A device's own rates, as ``plan`` wants them: measured in this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

from megappo.host_memory import host_memory
from megappo.layout.devices import DeviceProfile, known_profile

REPEATS = 5


def measure_device(matrix: int | None = None, copied: int | None = None) -> dict[str, Any]:
    """The profile of this process's first device; of the CPU where there is no GPU.

    Args:
        matrix: rows of the square matrices that are multiplied; 8192 on a GPU, 2048 on a CPU.
        copied: bytes that are copied; 2 GiB on a GPU, 256 MiB on a CPU.
    """
    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if on_cuda else "cpu")
    matrix, copied = matrix or (8192 if on_cuda else 2048), copied or ((2 << 30) if on_cuda else (256 << 20))
    name = torch.cuda.get_device_name() if on_cuda else "cpu"
    known = known_profile(name)
    memory = torch.cuda.mem_get_info()[1] if on_cuda else host_memory()
    dtype = torch.bfloat16 if on_cuda else torch.float32
    a, b = (torch.randn(matrix, matrix, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    flops = 2 * matrix**3 / _seconds(lambda: torch.matmul(a, b, out=out))
    source, target = (torch.ones(copied, dtype=torch.uint8, device=device) for _ in range(2))
    local = 2 * copied / _seconds(lambda: target.copy_(source))
    sources = {
        "memory_gib": "as the device tells",
        "host_memory_gib": "as the node tells",
        "matrix_tflops": f"measured: {str(dtype).removeprefix('torch.')} product of {matrix} x {matrix} matrices",
        "memory_gb_s": f"measured: copy of {copied >> 20} MiB, bytes read and written",
    }
    rates = {
        "memory_gib": memory / (1 << 30),
        "host_memory_gib": host_memory() / (1 << 30),
        "matrix_tflops": flops / 1e12,
        "memory_gb_s": local / 1e9,
    }
    if on_cuda:
        host = torch.empty(copied, dtype=torch.uint8, pin_memory=True)
        rates["host_gb_s"] = copied / _seconds(lambda: host.copy_(source)) / 1e9
        sources["host_gb_s"] = f"measured: copy of {copied >> 20} MiB to pinned memory"
    else:
        rates["host_gb_s"] = local / 2e9
        sources["host_gb_s"] = "half of memory_gb_s: the host's memory is the device's"
    if on_cuda and torch.cuda.device_count() > 1:
        other = torch.empty(copied, dtype=torch.uint8, device="cuda:1")
        rates["node_gb_s"] = copied / _seconds(lambda: other.copy_(source)) / 1e9
        sources["node_gb_s"] = "measured: copy to the next device"
    else:
        rates["node_gb_s"] = known.node_gb_s if known else rates["host_gb_s"]
        sources["node_gb_s"] = f"not measured: as {known.name} has it" if known else "not measured: as to the host"
    rates["network_gb_s"] = known.network_gb_s if known else 1.0
    sources["network_gb_s"] = "not measured: megappo doctor CONFIG measures it between nodes"
    count = torch.cuda.device_count() if on_cuda else 1
    if on_cuda:
        major, minor = torch.cuda.get_device_capability()
        rates["compute_capability"], sources["compute_capability"] = major + minor / 10, "as the device tells"
    rounded = {key: float(f"{value:.4g}") for key, value in rates.items()}
    return {"name": name, **rounded, "devices_per_node": count, "sources": sources}


def write_profile(path: Path, profile: dict[str, Any]) -> None:
    """Write what ``plan --device`` reads."""
    DeviceProfile(**profile)  # has every field
    path.write_text(yaml.safe_dump(profile, sort_keys=False, width=120))


def _seconds(work: Callable[[], Any]) -> float:
    """The best of some repeats, after one that does not count."""
    times = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times[1:])
