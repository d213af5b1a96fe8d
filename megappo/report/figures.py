"""What the report draws: the phases of a step, and the curves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# The phases in the order of a step; "testing" and "save_checkpoint" are drawn too, since a user waits for them.
PHASES = {
    "gen": "generate",
    "sleep": "engine sleeps",
    "reward": "reward",
    "old_log_prob": "actor log-probs",
    "ref": "reference log-probs",
    "values": "critic values",
    "adv": "advantages",
    "update_critic": "update critic",
    "update_actor": "update actor",
    "offload": "offload",
    "wake": "engine wakes",
    "update_weights": "weight sync",
    "testing": "validation",
    "save_checkpoint": "checkpoint",
}
COMPUTING = ("gen", "old_log_prob", "ref", "values", "update_critic", "update_actor")
"""The phases that run a model."""


class Chart(NamedTuple):
    title: str
    metrics: Mapping[str, str]
    """metric name -> what the legend calls it"""
    hint: str = ""
    y_range: tuple[float, float] | None = None


CHARTS = (
    Chart("Train score", {"critic/score/mean": "mean"}, "mean score of the sampled responses"),
    Chart(
        "KL",
        {
            "actor/ppo_kl": "to the policy that sampled",
            "actor/reward_kl_penalty": "to the reference",
            "actor/kl_loss": "KL loss",
        },
        "nats a token",
        (0, 0),
    ),
    Chart("Entropy", {"actor/entropy": "entropy"}, "nats a token", (0, 0)),
    Chart("Response length", {"response_length/mean": "mean", "response_length/max": "longest"}, "tokens", (0, 0)),
    Chart(
        "Cut-off responses",
        {"response_length/clip_ratio": "share"},
        "share of responses that reached max_response",
        (0, 0),
    ),
    Chart("Policy loss", {"actor/pg_loss": "pg_loss"}),
    Chart(
        "Clipped share",
        {"actor/pg_clipfrac": "policy", "actor/pg_clipfrac_lower": "policy, dual clip", "critic/vf_clipfrac": "value"},
        "share of tokens that a clip held back",
        (0, 0),
    ),
    Chart("Value loss", {"critic/vf_loss": "vf_loss"}, "", (0, 0)),
    Chart("Explained variance", {"critic/vf_explained_var": "explained variance"}, "of the returns, by the critic"),
    Chart("Gradient norm", {"actor/grad_norm": "actor", "critic/grad_norm": "critic"}, "before clipping", (0, 0)),
    Chart("Learning rate", {"actor/lr": "actor", "critic/lr": "critic"}, "", (0, 0)),
    Chart("KL coefficient", {"actor/reward_kl_penalty_coeff": "coefficient"}, "of the penalty in the reward", (0, 0)),
    Chart("Throughput", {"perf/throughput": "tokens a second and device"}, "tokens a second and device", (0, 0)),
    Chart(
        "Model FLOP utilisation",
        {f"perf/mfu/{phase}": PHASES[phase] for phase in COMPUTING},
        "share of the devices' peak",
        (0, 0),
    ),
    Chart(
        "Device memory",
        {f"perf/device_memory_gb/{phase}": PHASES[phase] for phase in (*COMPUTING, "sleep", "wake", "update_weights")},
        "GiB taken of the fullest device when a turn ends",
        (0, 0),
    ),
    Chart(
        "Peak allocation",
        {f"perf/max_memory_allocated_gb/{role}": role for role in ("actor", "critic")},
        "GiB by tensors of the role's processes while it trains",
        (0, 0),
    ),
    Chart(
        "Engine against trainer",
        {"training/rollout_probs_diff_mean": "mean", "training/rollout_probs_diff_max": "largest"},
        "difference in the probability of a sampled token",
        (0, 0),
    ),
    Chart(
        "Engine with trainer", {"training/rollout_actor_probs_pearson_corr": "correlation"}, "of those probabilities"
    ),
)
