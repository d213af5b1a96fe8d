"""What holds for all tests: one thread a process, nothing fetched, and `gpu` tests only where there is a GPU.

``launch/test.sh`` runs them in two lanes. In the first, two processes of pytest-xdist share the files. Those of the
group "runs" start whole runs and go to one of the two: two runs at a time would be late for each other's limits. The
second lane has what is marked ``alone``.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

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

settings.register_profile("shared machine", deadline=None)  # how long an example takes is not what is tested
settings.load_profile("shared machine")


@pytest.fixture
def own_heap() -> Iterator[None]:
    """Time as in a process of one's own: the garbage collector passes over what other tests have left behind."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lane", choices=("together", "alone"), help="only the tests that may, or may not, run at once")


# Before other plugins, such as xdist, see the tests.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if lane := config.getoption("lane"):
        alone = [bool(item.get_closest_marker("alone") or item.get_closest_marker("gpu")) for item in items]
        left_out = [item for item, apart in zip(items, alone, strict=True) if apart != (lane == "alone")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.name))
    items.sort(key=lambda item: item.get_closest_marker("xdist_group").args != ("runs",))  # the longest first
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))
