"""Generation through the rollout worker against vLLM's own ``LLM.generate``: same engine, prompts and parameters."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from megappo.bench.shapes import make_qwen
from megappo.bench.table import show
from megappo.data import batch


def run(size: str, folder: str, out: str | None, *, prompts: int = 512, prompt: int = 128, response: int = 256) -> None:
    """Measure, alternating, three times after a warm-up; the best of each counts."""
    from megappo.workers.rollout_engine import RolloutEngine
    from megappo.workers.settings import EngineSettings, Sampling

    on_cuda = torch.cuda.is_available()
    model = make_qwen(Path(folder) / size, size, device="cuda" if on_cuda else "cpu")
    engine = RolloutEngine(
        EngineSettings(
            folder=str(model),
            tp=1,
            dtype="bfloat16" if on_cuda else "float32",
            max_tokens=prompt + response,
            max_sequences=prompts,
            memory_fraction=0.8,
            kv_cache_gib=1.0,
            on_cuda=on_cuda,
            sleep="off",
            seed=0,
        )
    )
    ids = np.random.default_rng(0).integers(100, 1000, prompts * prompt).astype(np.int32)
    requests = pa.table({"id": pa.array(range(prompts)), "prompt_ids": batch.ragged(ids, [prompt] * prompts)})
    from vllm import SamplingParams

    bare_params = SamplingParams(
        max_tokens=response,
        temperature=1.0,
        logprobs=0,
        detokenize=False,
        stop_token_ids=engine.stop_ids,
    )
    bare_prompts = [{"prompt_token_ids": row.tolist()} for row in batch.split_rows(requests, "prompt_ids")]

    def ours() -> int:
        table = engine.generate(requests, Sampling(1.0, 1.0, -1, response), seed=0, version=0)
        return int(batch.lengths(table, "response_ids").sum())

    def bare() -> int:
        outputs = engine.engine.generate(bare_prompts, bare_params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    rates: dict[str, list[float]] = {"ours": [], "bare": []}
    functions: dict[str, Callable[[], int]] = {"ours": ours, "bare": bare}
    for turn in range(4):
        for name, function in functions.items():
            engine.engine.reset_prefix_cache()
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
