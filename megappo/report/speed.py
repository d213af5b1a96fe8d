"""Model operations a second of each phase, per device, and their share of the device's peak (MFU)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from megappo.config import SCALAR_HEAD, Config
from megappo.layout.flops import BACKWARD, FROZEN_BACKWARD, Shape, forward_flops
from megappo.models.spec import read_model_spec


@dataclass(frozen=True)
class Worker:
    """A role's model and how many devices work on it; whether its weights are frozen and only adapters train."""

    shape: Shape
    devices: int
    scalar_head: bool = False
    frozen: bool = False


PASSES: Mapping[str, tuple[str, bool]] = {
    "gen": ("rollout", False),
    "old_log_prob": ("actor", False),
    "ref": ("reference", False),
    "values": ("critic", False),
    "reward_model": ("reward", False),
    "update_actor": ("actor", True),
    "update_critic": ("critic", True),
}
"""Phase: the role whose model it runs, and whether it trains."""


def speed_workers(config: Config) -> dict[str, Worker]:
    """Each role's model and the devices of its pool."""
    roles = config.roles
    pools = {"rollout": roles.rollout.pool, **{name: role.pool for name, role in roles.megatron.items()}}
    if config.reference_is_base:
        pools["reference"] = roles.actor.pool
    return {
        role: Worker(
            read_model_spec(config.model_folder(role if role in roles.megatron else "actor")),
            config.pools[pool].devices,
            scalar_head=role in SCALAR_HEAD,
            frozen=role in roles.megatron and roles.megatron[role].lora is not None,
        )
        for role, pool in pools.items()
    }


def speed_metrics(
    workers: Mapping[str, Worker],
    times: Mapping[str, float],
    tokens: np.ndarray,
    response_tokens: np.ndarray,
    *,
    trained: np.ndarray,
    passes: Callable[[str], int],
    peak_tflops: float | None,
    shares: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """``perf/tflops/<phase>`` per device and, where the peak is known, ``perf/mfu/<phase>``.

    Args:
        workers: by role.
        times: ``timing_s/<phase>`` in seconds.
        tokens, response_tokens: of each row.
        trained: whether each row is in the updates.
        passes: of each trained role over the batch, in an update.
        peak_tflops: of one device.
        shares: responses that a phase went over for each of these rows, where those are not the same; all are taken to
            be as long.
    """
    out = {}
    for phase, (role, trains) in PASSES.items():
        seconds, worker = times.get(f"timing_s/{phase}", 0.0), workers.get(role)
        if worker is None or seconds <= 0:
            continue
        rows = trained if trains else np.ones_like(trained)
        head_tokens = 0 if worker.scalar_head else int(response_tokens[rows].sum())
        forward = forward_flops(worker.shape, tokens[rows].tolist(), head_tokens)
        forward *= (shares or {}).get(phase, 1.0)
        backward = FROZEN_BACKWARD if worker.frozen else BACKWARD
        flops = forward * (1 + backward) * passes(role) if trains else forward
        out[f"perf/tflops/{phase}"] = flops / seconds / worker.devices / 1e12
        if peak_tflops:
            out[f"perf/mfu/{phase}"] = out[f"perf/tflops/{phase}"] / peak_tflops
    return out
