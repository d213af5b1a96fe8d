"""What the report draws: the phases of a step, and the curves."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

# The phases in the order of a step; "testing" and "save_checkpoint" are drawn too, since a user waits for them.
PHASES = {
    "gen": "generate",
    "sleep": "engine sleeps",
    "reward": "reward",
    "old_log_prob": "actor log-probs",
    "ref": "reference log-probs",
    "values": "critic values",
    "reward_model": "reward model",
    "adv": "advantages",
    "update_critic": "update critic",
    "update_actor": "update actor",
    "offload": "offload",
    "wake": "engine wakes",
    "update_weights": "weight sync",
    "testing": "validation",
    "save_checkpoint": "checkpoint",
}
COMPUTING = ("gen", "old_log_prob", "ref", "values", "reward_model", "update_critic", "update_actor")
"""The phases that run a model."""
PREDICTED = "predicted"
"""Lines whose names end so are dashed."""


class Chart(NamedTuple):
    title: str
    metrics: Mapping[str, str]
    """metric name -> what the legend calls it"""
    hint: str = ""
    y_range: tuple[float, float] | None = None


def chart_groups(names: Collection[str]) -> dict[str, list[Chart]]:
    """Title of a group -> its charts, of which some follow from the names of the metrics that were logged."""
    names = sorted(names)
    return {
        "Training on examples": list(EXAMPLES),
        "Scores": [*_validation(names), *SCORES, *_rewards(names)],
        "Policy and critic": [*POLICY, *CRITIC, *_guards(names)],
        "Responses": list(RESPONSES),
        "Speed and memory": list(SPEED),
        "Engine against trainer": list(ENGINE),
    }


GRAD_NORMS, RATES = (
    {f"{family}/{name}": role for family, role in (("actor", "actor"), ("critic", "critic"), ("train", "model"))}
    for name in ("grad_norm", "lr")
)
EXAMPLES = (
    Chart("Loss", {"train/loss": "training", "val/loss": "validation"}, "nats"),
    Chart(
        "Accuracy", {"train/accuracy": "training", "val/accuracy": "validation"}, "share of pairs in the right order"
    ),
    Chart("Gap", {"train/gap": "training", "val/gap": "validation"}, "score of the chosen less that of the rejected"),
)
SCORES = (Chart("Train score", {"critic/score/mean": "mean"}, "mean score of the sampled responses"),)
POLICY = (
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
    Chart("Policy loss", {"actor/pg_loss": "pg_loss"}),
    Chart(
        "Clipped share",
        {"actor/pg_clipfrac": "policy", "actor/pg_clipfrac_lower": "policy, dual clip", "critic/vf_clipfrac": "value"},
        "share of tokens that a clip held back",
        (0, 0),
    ),
    Chart("Gradient norm", GRAD_NORMS, "before clipping", (0, 0)),
    Chart("Learning rate", RATES, "", (0, 0)),
    Chart("KL coefficient", {"actor/reward_kl_penalty_coeff": "coefficient"}, "of the penalty in the reward", (0, 0)),
)
CRITIC = (
    Chart("Value loss", {"critic/vf_loss": "vf_loss"}, "", (0, 0)),
    Chart("Explained variance", {"critic/vf_explained_var": "explained variance"}, "of the returns, by the critic"),
    Chart("Values and returns", {"critic/values/mean": "values", "critic/returns/mean": "returns"}, "mean of a token"),
)
RESPONSES = (
    Chart("Response length", {"response_length/mean": "mean", "response_length/max": "longest"}, "tokens", (0, 0)),
    Chart(
        "Cut-off responses",
        {"response_length/clip_ratio": "share"},
        "share of responses that reached max_response",
        (0, 0),
    ),
    Chart(
        "Produced by the policy",
        {"response_length/produced_ratio": "share"},
        "share of response tokens that the loss mask keeps",
        (0, 1),
    ),
    Chart(
        "Staleness",
        {"staleness/mean": "mean", "staleness/max": "oldest"},
        "updates since the weights that began a response",
        (0, 0),
    ),
    Chart(
        "Responses across weight syncs",
        {"staleness/partial_share": "share"},
        "share of responses that several versions of the weights drew",
        (0, 0),
    ),
    Chart(
        "Dynamic sampling",
        {"train/sampled_prompts": "prompts sampled", "train/informative_prompts": "of them, with differing scores"},
        "",
        (0, 0),
    ),
)
SPEED = (
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
        {
            f"perf/{kind}_gb/{role}": f"{role}{what}"
            for role in ("actor", "critic")
            for kind, what in (("max_memory_allocated", ""), ("predicted_memory", f", {PREDICTED}"))
        },
        "GiB by tensors of the role's processes while it trains",
        (0, 0),
    ),
)
ENGINE = (
    Chart(
        "Difference",
        {"training/rollout_probs_diff_mean": "mean", "training/rollout_probs_diff_max": "largest"},
        "in the probability of a sampled token",
        (0, 0),
    ),
    Chart("Agreement", {"training/rollout_actor_probs_pearson_corr": "correlation"}, "of those probabilities"),
    Chart(
        "Correction",
        {"training/correction_mean": "mean weight", "training/correction_truncated": "share truncated"},
        "of tokens that were sampled with other probabilities",
        (0, 0),
    ),
)


def main_scores(names: Iterable[str], kind: str = "val-core") -> dict[str, str]:
    """The mean@n of each data source -> what to call it: of its accuracy if it reports one, else of its reward.

    ``val-core/gsm8k/acc/mean@1`` is called "gsm8k acc".
    """
    chosen: dict[str, tuple[str, str]] = {}
    for name in names:
        match = re.fullmatch(rf"{kind}/(.+)/(acc|reward)/mean@\d+", name)
        if match and (match[1] not in chosen or match[2] == "acc"):
            chosen[match[1]] = (name, f"{match[1]} {match[2]}")
    return dict(chosen.values())


def _validation(names: Sequence[str]) -> Iterator[Chart]:
    """The main score of all data sources, of the canary's, and for each source what its samples give together."""
    main = main_scores(names)
    if main:
        yield Chart("Validation", main, "mean score on the validation data")
    if canary := main_scores(names, "canary"):
        yield Chart("Canary", canary, "mean score on the watched prompts")
    for mean, title in main.items():
        measured, label = mean.removeprefix("val-core/").rsplit("/", 1)
        samples = label.split("@")[1]
        together = re.compile(rf"val-(?:core|aux)/{re.escape(measured)}/((?:best|maj|pass|worst)@{samples})(?:/mean)?")
        lines = {name: match[1] for name in names if (match := together.fullmatch(name))}
        if lines:
            lines[mean] = label
            order = sorted(
                lines, key=lambda name: ("pass", "best", "maj", "mean", "worst").index(lines[name].split("@")[0])
            )
            yield Chart(title, {name: lines[name] for name in order}, f"{samples} samples of each validation prompt")


def _rewards(names: Sequence[str]) -> Iterator[Chart]:
    components = {name: match[1] for name in names if (match := re.fullmatch(r"reward/(.+)/mean", name))}
    if components:
        yield Chart("Reward components", components, "means of what reward functions returned beside the score")


def _guards(names: Sequence[str]) -> Iterator[Chart]:
    guards = {name: name.removeprefix("guard/") for name in names if name.startswith("guard/")}
    factors = {"guard/rate_factor": "of the learning rate", "guard/kl_factor": "of the KL coefficient"}
    counts = {name: label for name, label in guards.items() if name not in factors}
    if counts:
        yield Chart("Guards", counts, "steps in a row beyond the limit", (0, 0))
    if factors.keys() & guards.keys():
        yield Chart("What guards have set", factors, "factors", (0, 0))
