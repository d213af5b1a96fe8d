"""Names of logged metrics: those that are known beforehand, and which others there can be."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_SUMMARY = ("mean", "max", "min")
_LENGTHS = (*_SUMMARY, "clip_ratio")
_PASSES = ("gen", "old_log_prob", "ref", "values", "reward_model", "update_actor", "update_critic")
_ON_DEVICES = (*_PASSES, "update_weights", "sleep", "wake", "offload")

FIXED = frozenset(
    [
        *(f"actor/{name}" for name in ("pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "ppo_kl_first")),
        *(f"actor/{name}" for name in ("ratio", "entropy", "kl_loss", "grad_norm", "lr")),
        *(f"actor/{name}" for name in ("reward_kl_penalty", "reward_kl_penalty_coeff")),
        *(f"critic/{name}" for name in ("vf_loss", "vf_clipfrac", "vpred_mean", "vf_explained_var", "grad_norm", "lr")),
        *(
            f"critic/{name}/{kind}"
            for name in ("score", "rewards", "advantages", "returns", "values")
            for kind in _SUMMARY
        ),
        *(f"{name}_length/{kind}" for name in ("prompt", "response") for kind in _LENGTHS),
        "response_length/produced_ratio",
        *(f"train/{name}" for name in ("num_gen_batches", "sampled_prompts", "informative_prompts")),
        *(f"training/rollout_{name}_diff_{kind}" for name in ("probs", "logprobs") for kind in ("mean", "max")),
        *(f"training/{name}" for name in ("rollout_actor_probs_pearson_corr", "global_step", "epoch")),
        *(f"staleness/{name}" for name in ("mean", "max", "partial_share")),
        *(f"training/{name}" for name in ("correction_mean", "correction_truncated")),
        *(f"timing_s/{name}" for name in (*_ON_DEVICES, "reward", "adv", "step", "testing", "save_checkpoint")),
        *(f"perf/{name}" for name in ("total_num_tokens", "time_per_step", "throughput", "driver_share", "sync_bytes")),
        *(f"perf/{kind}/{phase}" for kind in ("tflops", "mfu") for phase in _PASSES),
        *(f"perf/predicted_s/{phase}" for phase in (*_PASSES, "update_weights", "sleep", "wake", "adv", "step")),
        *(f"perf/device_memory_gb/{phase}" for phase in _ON_DEVICES),
        *(
            f"perf/{kind}_gb/{role}"
            for kind in ("max_memory_allocated", "predicted_memory")
            for role in ("actor", "critic")
        ),
    ]
)
"""Every name but those of :data:`OPEN`."""

VALIDATION = ("val-core", "val-aux", "canary")
OPEN = (*VALIDATION, "reward", "guard", "perf/busy_share", "perf/idle_share")
"""What names begin with that depend on the data, the reward functions, or what the user calls guards and pools."""


def family(name: str) -> str:
    """What comes before the first slash."""
    return name.split("/")[0]


def unknown_name(name: str) -> str:
    """Why no run can log a metric of this name, with what may be meant; empty if one can."""
    if name in FIXED or name.startswith(tuple(f"{group}/" for group in OPEN)):
        return ""
    return f"{name} is no metric that a run logs{meant(name, FIXED)}"


def subset_sizes(samples: int) -> list[int]:
    """2, 4, 8, ... below ``samples``, and ``samples``; of one sample there are none."""
    powers = [2**exponent for exponent in range(1, samples.bit_length()) if 2**exponent < samples]
    return [*powers, samples] if samples > 1 else []


def wrong_samples(name: str, samples: int) -> str:
    """What ``kind@n`` in the name of a validation metric should be, with so many samples; empty if it is right."""
    found = re.search(r"/(mean|std|best|worst|maj|pass)@(\d+)(?=/|$)", name)
    if found is None or family(name) not in VALIDATION:
        return ""
    kind, number = found[1], int(found[2])
    sizes = {"mean": [samples], "std": subset_sizes(samples)[-1:]}.get(kind, subset_sizes(samples))
    if number in sizes:
        return ""
    return " or ".join(f"{kind}@{size}" for size in sizes) or f"mean@{samples}"


def meant(name: str, names: Iterable[str]) -> str:
    """``: did you mean ...?``, or which families there are."""
    close = difflib.get_close_matches(name, sorted(names), 3, 0.6)
    if close:
        return f": did you mean {' or '.join(close)}?"
    families = sorted({family(known) for known in (*FIXED, *OPEN)})
    return f": names begin with {', '.join(f'{known}/' for known in families)}"
