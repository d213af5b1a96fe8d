"""Environment variables that vLLM and PyTorch must have as an engine imports them."""

from __future__ import annotations

import os


def vllm_environment(*, on_cuda: bool) -> dict[str, str]:
    """Those of an engine: some that it must have, others as they are set here already, if they are."""
    out, defaults = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    if not on_cuda:
        out["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # engines share the cores with all other processes
        # vLLM compiles one small function of its sampler even in eager mode: seconds, and a C++ compiler.
        defaults["TORCHDYNAMO_DISABLE"] = "1"
    return out | {name: os.environ.get(name, value) for name, value in defaults.items()}
