"""What holds for all tests: one thread a process, nothing fetched, and `gpu` tests only where there is a GPU.

``launch/test.sh`` runs them in lanes: whole runs, one at a time, beside all other tests; then what is to have the
machine to itself.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

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
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs, a lane here, ignore it

settings.register_profile("shared machine", deadline=None)  # how long an example takes is not what is tested
settings.load_profile("shared machine")

ALONE = ("alone", "ranks", "gpu")
"""Marks of what runs when nothing else does."""


@pytest.fixture
def own_heap() -> Iterator[None]:
    """Time as in a process of one's own: the garbage collector passes over what other tests have left behind."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def lane_of(item: pytest.Item) -> str:
    """Two runs at a time would be late for each other's limits; a run and other tests are not."""
    if any(item.get_closest_marker(mark) for mark in ALONE):
        return "alone"
    return "runs" if item.get_closest_marker("runs") else "others"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lane", choices=("runs", "others", "alone"), help="only the tests of this lane")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What a lane has nothing of need not be imported for it: that is torch, Megatron, Ray and more."""
    marks = {"alone": ALONE, "runs": ("runs",)}.get(config.getoption("lane") or "", ())
    if not marks or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text()
    return None if any(f"mark.{mark}" in text for mark in marks) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if lane := config.getoption("lane"):
        left_out = [item for item in items if lane_of(item) != lane]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if lane_of(item) == lane]
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))
