"""Generation through the rollout worker against vLLM's own ``LLM.generate``: same engine, prompts and parameters."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from megappo.bench.shapes import make_qwen
from megappo.bench.table import show
from megappo.data import batch

PROMPTS, PROMPT, RESPONSE = 512, 128, 256
"""Prompts, and the tokens of each and of its response."""


def run(size: str, folder: str, out: str | None) -> None:
    """Measure, alternating, three times after a warm-up; the best of each counts."""
    model = make_qwen(Path(folder) / size, size, device="cuda" if torch.cuda.is_available() else "cpu")
    engine = make_engine(model)
    rates: dict[str, list[float]] = {"ours": [], "bare": []}
    functions: dict[str, Callable[[], int]] = {"ours": lambda: ours(engine), "bare": lambda: bare(engine)}
    for turn in range(4):
        for name, function in functions.items():
            began = time.perf_counter()
            tokens = function()
            if turn:
                rates[name].append(tokens / (time.perf_counter() - began))
    row: dict[str, float | str] = {
        "size": size,
        "ours tokens/s": max(rates["ours"]),
        "bare tokens/s": max(rates["bare"]),
    }
    show(f"rollout {size}", [{**row, "ours / bare": max(rates["ours"]) / max(rates["bare"])}], out)


def make_engine(model: Path) -> Any:
    """An engine that never sleeps."""
    from megappo.workers.rollout_engine import RolloutEngine
    from megappo.workers.settings import EngineSettings

    on_cuda = torch.cuda.is_available()
    return RolloutEngine(
        EngineSettings(
            folder=str(model),
            tp=1,
            dtype="bfloat16" if on_cuda else "float32",
            max_tokens=PROMPT + RESPONSE,
            max_sequences=PROMPTS,
            memory_fraction=0.8,
            kv_cache_gib=1.0,
            on_cuda=on_cuda,
            sleep="off",
            seed=0,
        )
    )


def ours(engine: Any) -> int:
    """Generate through the worker's method; returns the number of tokens. No prompt has been seen before."""
    from megappo.workers.settings import Sampling

    requests = pa.table({"id": pa.array(range(PROMPTS)), "prompt_ids": batch.ragged(_tokens(), [PROMPT] * PROMPTS)})
    table = engine.generate(requests, Sampling(1.0, 1.0, -1, RESPONSE), seed=0, version=0)
    return int(batch.lengths(table, "response_ids").sum())


def bare(engine: Any) -> int:
    """Generate by vLLM's own method."""
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=RESPONSE, temperature=1.0, logprobs=0, detokenize=False, stop_token_ids=engine.stop_ids
    )
    prompts = [{"prompt_token_ids": row.tolist()} for row in _tokens().reshape(PROMPTS, PROMPT)]
    outputs = engine.engine.generate(prompts, params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs)


_random = np.random.default_rng(0)


def _tokens() -> np.ndarray:
    return _random.integers(100, 1000, PROMPTS * PROMPT).astype(np.int32)
