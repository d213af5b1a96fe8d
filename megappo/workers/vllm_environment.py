"""Environment variables that vLLM and PyTorch must have as an engine imports them."""

from __future__ import annotations

import os


def vllm_environment(*, on_cuda: bool) -> dict[str, str]:
    """Those of an engine; all but the first are as the user has set them, if they are set."""
    defaults = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    if not on_cuda:
        # vLLM compiles one small function of its sampler even in eager mode: seconds, and a C++ compiler.
        defaults |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        **{name: os.environ.get(name, value) for name, value in defaults.items()},
    }
