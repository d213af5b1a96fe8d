"""Environment variables of worker processes, and what the driver's say of the cluster."""

from __future__ import annotations

import os

from megappo.config import Devices
from megappo.workers.vllm_environment import vllm_environment

FORWARDED = ("NCCL_", "GLOO_", "UCX_", "VLLM_", "NVTE_", "TORCH_NCCL_", "TORCH_FR_")
"""Environment variables with these beginnings reach the workers as the driver has them."""


def worker_environment(config: Devices, **more: str) -> dict[str, str]:
    """Environment variables of a worker process."""
    out = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
    out |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    if config.run.device == "cpu":
        out |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    elif config.run.dtype == "float32":
        out["NVIDIA_TF32_OVERRIDE"] = "0"  # float32 shall mean float32
    return out | more


def engine_environment(config: Devices, **more: str) -> dict[str, str]:
    """Environment variables of a process that has imported vLLM before it is told to be an engine."""
    return {**worker_environment(config), **vllm_environment(on_cuda=config.run.device == "cuda"), **more}


def has_own_ray() -> bool:
    """Whether Ray is started here, and is not the cluster that ``RAY_ADDRESS`` names."""
    return not os.environ.get("RAY_ADDRESS")
