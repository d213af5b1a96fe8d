"""Guards and the best checkpoint: whether what they watch is ever logged, and tells anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase

from megappo.check.findings import Advice
from megappo.config import Config
from megappo.metric_names import VALIDATION, family, unknown_name, wrong_samples


def guard_findings(config: Config) -> Iterator[str]:
    """Guards that could never act."""
    for name, guard in config.ppo.guards.items():
        key = f"ppo.guards.{name}"
        if guard.above is None and guard.below is None:
            yield f"{key}: has no limit: give above, below or both"
        elif guard.above is not None and guard.below is not None and guard.above < guard.below:
            yield f"{key}.above: {guard.above} is less than below {guard.below}, which leaves nothing: swap them"
        if problem := unknown_name(guard.metric):
            yield f"{key}.metric: {problem}"
        elif problem := says_nothing(config, guard.metric):
            yield f"{key}.metric: {guard.metric} {problem}: choose another"
        if family(guard.metric) in VALIDATION:
            yield from _validation_findings(config, f"{key}.metric", guard.metric)
        if guard.action == "raise_kl" and not config.ppo.kl.in_use:
            yield f"{key}.action: raise_kl has no KL term to strengthen: set ppo.kl.in_reward or loss_coef"


def best_findings(config: Config) -> Iterator[str]:
    """The metric by which the best checkpoint is told."""
    best, key = config.run.keep_best, "run.keep_best.metric"
    if best is None:
        return
    if family(best.metric) not in VALIDATION:
        yield (
            f"{key}: {best.metric} is no metric of a validation: give one such as val-core/SOURCE/acc/mean@1, as the "
            "log has it"
        )
        return
    yield from _validation_findings(config, key, best.metric)


def _validation_findings(config: Config, key: str, metric: str) -> Iterator[str]:
    samples = config.roles.rollout.validation_samples
    if right := wrong_samples(metric, samples):  # of as many as a validation draws
        yield (f"{key}: {metric} is never logged, as roles.rollout.validation_samples is {samples}: write {right}")
    source = "canary" if family(metric) == "canary" else "validation"
    if not getattr(config.data, source):
        yield f"{key}: {metric} is never logged without data.{source}: name files there"
    elif not config.run.validate_every:
        yield Advice(f"{key}: {metric} is logged at the end only: set run.validate_every")


def says_nothing(config: Config, metric: str) -> str:
    """Why a metric is never logged in a run of this configuration, or always the same; empty if it is alive."""
    if metric.startswith(("perf/busy_share/", "perf/idle_share/")):
        pools = (*config.pools, "driver")  # where functions score
        return "" if metric.split("/", 2)[2] in pools else f"is of no pool: pools are {', '.join(pools)}"
    for patterns, is_alive, why in _ALIVE:
        if any(fnmatchcase(metric, pattern) for pattern in patterns) and not is_alive(config):
            return why
    return ""


def _has_reference(config: Config) -> bool:
    return config.roles.reference is not None or config.reference_is_base


def _engines_sleep(config: Config) -> bool:
    rollout = config.roles.rollout
    shared = any(role.pool == rollout.pool for role in config.roles.megatron.values())
    return shared and config.run.device == "cuda" and rollout.sleep != "off"


def _actor_rests(config: Config) -> bool:
    """Whether all wait for what the actor moves to the host: other roles' moves go on while something else is done."""
    actor = config.roles.actor
    beside = actor.pool == config.roles.rollout.pool and actor.offload != "none"
    return actor.offload == "all" or (beside and _engines_sleep(config))


_OF_THE_CRITIC = (
    *("critic/v*", "critic/returns/*", "critic/grad_norm", "critic/lr", "timing_s/values", "timing_s/update_critic"),
    *("perf/*/values", "perf/*/update_critic", "perf/*/critic"),
)
_OF_THE_ACTOR = (
    *("actor/pg_*", "actor/ppo_kl*", "actor/ratio", "actor/entropy", "actor/kl_loss", "actor/grad_norm", "actor/lr"),
    *("training/correction_*", "timing_s/update_actor", "perf/*/update_actor", "perf/*/actor"),
)
_OF_GENERATION = ("train/*", "staleness/*", "timing_s/gen", "perf/*/gen")

_ALIVE: tuple[tuple[tuple[str, ...], Callable[[Config], bool], str], ...] = (
    (("guard/*", "timing_s/save_checkpoint"), lambda _: False, "is known only when guards have seen the step"),
    (_OF_THE_CRITIC, lambda c: c.ppo.needs_critic, "is never logged without a critic"),
    (("critic/vf_clipfrac",), lambda c: c.ppo.value_clip is not None, "is always 0 without ppo.value_clip"),
    (_OF_THE_ACTOR, lambda c: c.ppo.critic_warmup < c.run.steps, "is never logged, as only the critic trains"),
    (
        ("actor/pg_clipfrac_lower",),
        lambda c: c.ppo.loss == "ppo" and c.ppo.dual_clip is not None,
        "is always 0 without ppo.loss ppo and its dual_clip",
    ),
    (("actor/kl_loss",), lambda c: c.ppo.kl.loss_coef > 0, "is never logged without ppo.kl.loss_coef"),
    (("actor/reward_kl_penalty",), _has_reference, "is always 0 without a reference"),
    (
        ("actor/reward_kl_penalty_coeff",),
        lambda c: c.ppo.kl.in_reward,
        "is the coefficient of nothing without ppo.kl.in_reward",
    ),
    (("timing_s/ref", "perf/*/ref"), _has_reference, "is never logged without a reference"),
    (
        ("timing_s/reward_model", "perf/*/reward_model"),
        lambda c: c.roles.reward.pool is not None,
        "is never logged without a reward model",
    ),
    (
        ("training/correction_*",),
        lambda c: c.ppo.correction_level != "off",
        "is never logged while ppo.correction.level is off, as it is by default without ppo.staleness",
    ),
    (("staleness/*",), lambda c: c.ppo.staleness > 0, "is never logged without ppo.staleness"),
    (("staleness/partial_share",), lambda c: c.ppo.streams, "is never logged with ppo.staleness below 2"),
    (("train/*",), lambda c: c.ppo.dynamic_sampling is not None, "is never logged without ppo.dynamic_sampling"),
    (_OF_GENERATION, lambda c: not c.data.replay, "is never logged with data.replay"),
    (("response_length/produced_ratio",), lambda c: bool(c.data.replay), "is never logged without data.replay"),
    (
        ("timing_s/testing",),
        lambda c: bool(c.data.validation or c.data.canary),
        "is never logged without data.validation or canary",
    ),
    (
        ("timing_s/sleep", "timing_s/wake", "perf/*/sleep", "perf/*/wake"),
        _engines_sleep,
        "is never logged, as the engines never sleep",
    ),
    (("timing_s/offload", "perf/*/offload"), _actor_rests, "is never logged, as nothing waits for an offload"),
    (("perf/*_gb/*", "perf/predicted_s/*"), lambda c: c.run.device == "cuda", "is never logged on CPU"),
    (
        ("perf/mfu/*",),
        lambda c: c.run.device == "cuda" or c.run.peak_tflops is not None,
        "is never logged on CPU without run.peak_tflops",
    ),
)
"""Metrics by their names (* stands for anything), when a run logs them and they can change, and what is so if not. All
others are logged in every run."""
