"""A whole PPO step on one GPU that all roles share, against the sum of its bare parts.

The parts are what no program can leave out: generation by vLLM's own ``LLM.generate``, forward passes of actor,
reference and critic, Megatron's own training loops for both, and one copy of the weights on the device.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from megappo.bench import rollout, training
from megappo.bench.apart import apart
from megappo.bench.shapes import LETTERS, add_tokenizer, make_qwen
from megappo.bench.sync import device_copy
from megappo.bench.table import show
from megappo.models.spec import read_model_spec

WARM_UPS = 2
MINI_BATCH, MICRO_BATCH_TOKENS = 128, 32_768
LENGTH = rollout.PROMPT + rollout.RESPONSE


class Workload(NamedTuple):
    """What one step does, how many steps, and how far ahead batches are generated: counts, and lengths in tokens."""

    steps: int = 6
    prompts: int = rollout.PROMPTS
    prompt: int = rollout.PROMPT
    response: int = rollout.RESPONSE
    mini_batch: int = MINI_BATCH
    tokens: int = MICRO_BATCH_TOKENS
    staleness: int = 0


PHASES = ("gen", "sleep", "old_log_prob", "ref", "values", "update_critic", "update_actor", "wake", "update_weights")

CONFIG = """
run: {{dir: {run}, steps: 1000, seed: 1, device: {device}, dtype: {dtype}, dump_rollouts: false}}
model: {model}
data: {{train: {data}, prompts_per_step: {prompts}, max_prompt: {prompt}, max_response: {response}}}
{placement}
ppo:
  {{mini_batch: {mini_batch}, staleness: {staleness}, actor_lr: 1.0e-6, critic_lr: 1.0e-5,
  kl: {{in_reward: true, coef: 0.001}}}}
"""

ONE_POOL = """
pools: {{all: {{devices_per_node: 1}}}}
roles:
  actor: {{pool: all, micro_batch_tokens: {tokens}}}
  critic: {{pool: all, micro_batch_tokens: {tokens}}}
  reference: {{pool: all, micro_batch_tokens: {tokens}}}
  rollout: {{pool: all, max_sequences: {prompts}, memory_fraction: 0.35, sleep: "off"}}
  reward: {{function: megappo.rewards.arithmetic}}
"""


def run(size: str, folder: str, out: str | None) -> None:
    """Train some steps, then measure the parts in processes of their own.

    Raises:
        BenchError: a part could not be measured.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_qwen(Path(folder) / size, size, device=device)
    add_tokenizer(model)
    log = train_steps(model, Path(folder) / f"{size}-step", device, ONE_POOL)
    parts = {**apart(_bare_generation, model), **apart(_bare_passes, model)}
    whole, bare = float(np.median([step["timing_s/step"] for step in log])), sum(parts.values())
    row: dict[str, float | str] = {"size": size, "step s": whole, "parts s": bare, "step / parts": whole / bare}
    driver = {"driver %": 100 * float(np.median([step["perf/driver_share"] for step in log]))}
    show(f"step {size}", [{**row, **driver}], out)
    show(f"step {size}: seconds of each phase", [medians(log)], out)
    show(f"step {size}: seconds of each bare part", [parts], out)
    if told := _predicted(log):
        show(f"step {size}: predicted and measured", told, out)


def train_steps(
    model: Path, folder: Path, device: str, placement: str, workload: Workload | None = None
) -> list[dict[str, float]]:
    """Metrics of the steps after the warm-ups.

    Args:
        folder: made anew.
        placement: sections ``pools`` and ``roles``, in which ``{tokens}`` and ``{prompts}`` stand for sizes.
    """
    from megappo.cluster.cluster import Cluster
    from megappo.cluster.forks import Forks
    from megappo.config import load_config
    from megappo.run import Run
    from megappo.trainer import Trainer

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    workload = workload or Workload()
    _write_prompts(folder / "train.parquet", workload)
    sizes = workload._asdict()
    where = {"run": folder / "run", "model": model, "data": folder / "train.parquet"}
    how = {"device": device, "dtype": "bfloat16" if device == "cuda" else "float32"}
    text = CONFIG.replace("{placement}", placement).format(**sizes, **where, **how)
    (folder / "config.yaml").write_text(text)
    config = load_config(folder / "config.yaml")
    with (
        Forks(config, engines=True) as forks,
        Run(config) as run,
        Cluster(config, run.data_sources, run.console.status, forks) as cluster,
    ):
        trainer = Trainer(config, run, cluster)
        trainer.resume()
        for _ in range(workload.steps):
            trainer.train_step()
    lines = [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]
    return [line["metrics"] for line in lines if line["step"] > WARM_UPS]


def _write_prompts(path: Path, workload: Workload) -> None:
    rng = np.random.default_rng(0)
    rows = [
        {
            "data_source": "random",
            "prompt": "".join(rng.choice(list(LETTERS), workload.prompt)),
            "reward_model": {"style": "rule", "ground_truth": str(index)},
        }
        for index in range(workload.prompts)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


def medians(log: list[dict[str, float]]) -> dict[str, float]:
    names = [f"timing_s/{phase}" for phase in PHASES if f"timing_s/{phase}" in log[0]]
    return {name.removeprefix("timing_s/"): float(np.median([step[name] for step in log])) for name in names}


def _predicted(log: list[dict[str, float]]) -> list[dict[str, float | str]]:
    """A row for each phase and each role's memory that was predicted: medians over the steps."""
    rows: list[dict[str, float | str]] = []
    for name in sorted(log[0]):
        kind, _, what = name.removeprefix("perf/predicted_").partition("/")
        if name.startswith("perf/predicted_"):
            seen = f"timing_s/{what}" if kind == "s" else f"perf/max_memory_allocated_gb/{what}"
            told, found = (float(np.median([step.get(key, np.nan) for step in log])) for key in (name, seen))
            unit = "s" if kind == "s" else "GiB"
            rows.append({"what": what, "unit": unit, "predicted": told, "measured": found, "ratio": told / found})
    return rows


def _bare_generation(model: Path) -> dict[str, float]:
    engine = rollout.make_engine(model)
    return {"generation": training.median(lambda: rollout.bare(engine), warm_ups=1, repeats=3)}


def _bare_passes(model: Path) -> dict[str, float]:
    training.join_alone()
    rows = training.make_rows(rollout.PROMPTS, rollout.PROMPT, LENGTH, vocab_size=read_model_spec(model).vocab_size)
    seconds: dict[str, float] = {}
    for critic in (False, True):
        bare = training.BareLoop(training.make_role(model, MICRO_BATCH_TOKENS, critic=critic))
        micros = bare.micro_batches(rows)
        minis = [bare.micro_batches(rows.slice(at, MINI_BATCH)) for at in range(0, rollout.PROMPTS, MINI_BATCH)]
        forward = training.median(partial(bare.forward, micros), warm_ups=1, repeats=3)
        update = training.median(partial(bare.step, minis), warm_ups=1, repeats=3)
        if critic:
            seconds |= {"values": forward, "critic": update}
        else:
            weights = sum(param.nbytes for param in bare.role.params.values())
            seconds |= {"log-probabilities": forward, "reference": forward, "actor": update}
            seconds["weights"] = device_copy(weights) if torch.cuda.is_available() else 0.0
    return seconds
