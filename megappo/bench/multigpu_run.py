"""A whole PPO step on separate pools: how long each phase takes, and how busy each pool was."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megappo.bench import step

REWARD = "\n  reward: {{function: megappo.rewards.arithmetic}}\n"
TWO = """
pools: {{train: {{devices_per_node: 1}}, serve: {{devices_per_node: 1}}}}
roles:
  actor: {{pool: train, micro_batch_tokens: {tokens}}}
  critic: {{pool: train, micro_batch_tokens: {tokens}}}
  reference: {{pool: train, micro_batch_tokens: {tokens}}}
  rollout: {{pool: serve, max_sequences: {prompts}}}"""
FOUR = """
pools: {{train: {{devices_per_node: 2}}, value: {{devices_per_node: 1}}, serve: {{devices_per_node: 1}}}}
roles:
  actor: {{pool: train, tp: 2, sequence_parallel: true, micro_batch_tokens: {tokens}}}
  critic: {{pool: value, micro_batch_tokens: {tokens}}}
  reference: {{pool: value, micro_batch_tokens: {tokens}}}
  rollout: {{pool: serve, max_sequences: {prompts}}}"""
EIGHT = """
pools: {{train: {{devices_per_node: 4}}, value: {{devices_per_node: 2}}, serve: {{devices_per_node: 2}}}}
roles:
  actor: {{pool: train, tp: 2, pp: 2, sequence_parallel: true, micro_batch_tokens: {tokens}}}
  critic: {{pool: value, pp: 2, micro_batch_tokens: {tokens}}}
  reference: {{pool: value, pp: 2, micro_batch_tokens: {tokens}}}
  rollout: {{pool: serve, max_sequences: {prompts}}}"""
PLACEMENTS = {2: TWO, 4: FOUR, 8: EIGHT}
"""By number of devices: a pool for each of the actor, the other models and the engines, as far as devices reach."""

ON_CPU = step.Workload(steps=4, prompts=8, prompt=8, response=8, mini_batch=4, tokens=64)


def measure(
    model: Path, folder: Path, world: int, *, on_cuda: bool
) -> tuple[list[dict[str, float | str]], list[dict[str, float | str]]]:
    """Medians over the steps after the warm-ups: a row of phases, and a row a pool.

    With two devices only generation has another to itself, so the next batch is generated while one is trained on.
    """
    workload = (step.Workload() if on_cuda else ON_CPU)._replace(staleness=int(world == 2))
    log = step.train_steps(model, folder, "cuda" if on_cuda else "cpu", PLACEMENTS[world] + REWARD, workload)

    def median(name: str) -> float:
        return float(np.median([line[name] for line in log]))

    phases: dict[str, float | str] = {"step": median("timing_s/step"), **step.medians(log)}
    busy = {
        name.removeprefix("perf/busy_share/"): median(name) for name in log[0] if name.startswith("perf/busy_share")
    }
    pools: list[dict[str, float | str]] = [{"pool": pool, "busy": share} for pool, share in busy.items()]
    together = sum(busy.values()) + median("perf/driver_share") - 1  # beyond 1: pools at work at the same time
    return [phases], [*pools, {"pool": "at the same time as others", "busy": together}]
