"""What holds for all tests: one thread a process, nothing fetched, and `gpu` tests only where there is a GPU."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

# Before torch, Ray or vLLM is imported; the processes that tests start inherit it.
os.environ.update(
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_worker_niceness="0",  # 15 otherwise, so that other tests would starve a run
)
os.environ.pop("RAY_ADDRESS", None)


@pytest.fixture
def own_heap() -> Iterator[None]:
    """Time as in a process of one's own: the garbage collector passes over what other tests have left behind."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))
