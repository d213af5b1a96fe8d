"""Sampling and the algorithm: what does not go together, and what has no effect."""

from __future__ import annotations

from collections.abc import Iterator

from megappo.check.findings import Advice, under
from megappo.config import Config, PPOConfig
from megappo.metric_names import VALIDATION, family, unknown_name, wrong_samples


def sampling_findings(config: Config) -> Iterator[str]:
    """Sampling that the algorithm cannot account for."""
    rollout = config.roles.rollout
    for key, value, cuts, off in (
        ("top_p", rollout.top_p, rollout.top_p < 1, 1),
        ("top_k", rollout.top_k, rollout.top_k > 0, -1),
    ):
        if cuts:
            yield Advice(
                f"roles.rollout.{key}: {value} samples from a truncated distribution, while log-probabilities, ratios "
                f"and KL are of the full one, so that training is biased: set {off}"
            )
    if rollout.validation_temperature == 0:
        for key, cuts in (("top_p", rollout.validation_top_p < 1), ("top_k", rollout.validation_top_k > 0)):
            if cuts:
                yield Advice(
                    f"roles.rollout.validation_{key}: has no effect, as roles.rollout.validation_temperature 0 is "
                    "greedy: give a number > 0 there, or leave it out"
                )


def ppo_findings(config: Config) -> Iterator[str]:
    """What the algorithm needs, and what it would ignore."""
    ppo, rollout = config.ppo, config.roles.rollout
    responses = config.data.prompts_per_step * rollout.samples_per_prompt
    if ppo.mini_batch > responses:
        yield (
            f"ppo.mini_batch: {ppo.mini_batch} is more than the {responses} responses of a step "
            f"(data.prompts_per_step * roles.rollout.samples_per_prompt): give at most {responses}"
        )
    if rollout.temperature == 0:
        yield (
            "roles.rollout.temperature: 0 is greedy, so that there is nothing to learn from: give a number > 0 "
            "(roles.rollout.validation_temperature may be 0)"
        )
    if ppo.kl.in_use and config.roles.reference is None and not config.reference_is_base:
        term = "ppo.kl.in_reward" if ppo.kl.in_reward else "ppo.kl.loss_coef"
        yield f"roles.reference: missing, but {term} needs it: add it, or switch off in_reward and loss_coef in ppo.kl"
    if config.roles.reference is not None and not ppo.kl.in_use:
        yield Advice("roles.reference: no KL term uses it: leave it out, or set ppo.kl.in_reward or loss_coef")
    if ppo.kl.target is not None and not ppo.kl.in_reward:
        yield Advice("ppo.kl.target: has no effect without ppo.kl.in_reward: leave it out, or set in_reward")
    if ppo.kl.target is not None and responses >= 5 * ppo.kl.horizon:
        yield (
            f"ppo.kl.horizon: {ppo.kl.horizon} is too short for the {responses} responses of a step, so that the "
            f"adaptive coefficient could turn negative: give at least {responses // 5 + 1}"
        )
    if ppo.needs_critic and config.roles.critic is None:
        yield "roles.critic: missing, but ppo.estimator gae needs its values: add it, or choose another estimator"
    if ppo.needs_critic and config.roles.critic is not None and ppo.critic_lr is None:
        yield "ppo.critic_lr: missing, but the critic trains: give a learning rate"
    if not ppo.needs_critic and config.roles.critic is not None:
        yield (
            f"roles.critic: ppo.estimator {ppo.estimator} needs no values: leave it out (roles.critic=null), or set gae"
        )
    if not ppo.needs_critic and ppo.critic_warmup:
        yield f"ppo.critic_warmup: {ppo.critic_warmup} steps without a critic to train: set 0"
    if ppo.compares_responses and rollout.samples_per_prompt < 2:
        yield (
            f"ppo.estimator: {ppo.estimator} compares the responses to a prompt, and "
            f"roles.rollout.samples_per_prompt is {rollout.samples_per_prompt}: give at least 2"
        )
    if ppo.dynamic_sampling is not None and rollout.samples_per_prompt < 2:
        yield (
            "ppo.dynamic_sampling: one response to a prompt always equals itself, and "
            "roles.rollout.samples_per_prompt is 1: give at least 2, or null here"
        )
    if ppo.overlong is not None and ppo.overlong.buffer > config.data.max_response:
        yield (
            f"ppo.overlong.buffer: {ppo.overlong.buffer} is more than the {config.data.max_response} tokens of "
            "data.max_response: lower it"
        )
    if not ppo.needs_critic and ppo.critic_optimizer is not None:
        yield Advice("ppo.critic_optimizer: has no effect without a critic: leave it out")
    if not ppo.needs_critic and ppo.critic_updates > 1:
        yield Advice(f"ppo.critic_updates: {ppo.critic_updates} has no effect without a critic: set 1")
    yield from _guard_findings(config)
    if ppo.loss == "gspo":
        yield from _gspo_findings(ppo)
    if ppo.critic_warmup >= config.run.steps:
        yield Advice(
            f"ppo.critic_warmup: {ppo.critic_warmup} steps are all of run.steps, so that the actor never trains: "
            "lower it"
        )


def _guard_findings(config: Config) -> Iterator[str]:
    """Guards that could never act."""
    for name, guard in config.ppo.guards.items():
        key = f"ppo.guards.{name}"
        if guard.above is None and guard.below is None:
            yield f"{key}: has no limit: give above, below or both"
        elif guard.above is not None and guard.below is not None and guard.above < guard.below:
            yield f"{key}.above: {guard.above} is less than below {guard.below}, which leaves nothing: swap them"
        if problem := unknown_name(guard.metric):
            yield f"{key}.metric: {problem}"
        yield from under(f"{key}.metric", _sample_problem(config, guard.metric))
        kind = family(guard.metric)
        source = {"canary": "canary", "val-core": "validation", "val-aux": "validation"}.get(kind)
        if source and not getattr(config.data, source):
            yield f"{key}.metric: {guard.metric} is never logged without data.{source}: name files there"
        elif source and not config.run.validate_every:
            yield Advice(f"{key}.metric: {guard.metric} is logged at the end only: set run.validate_every")
        if kind == "critic" and not config.ppo.needs_critic and guard.metric.startswith(_OF_THE_CRITIC):
            yield f"{key}.metric: {guard.metric} is never logged without a critic: choose another"
        if guard.action == "raise_kl" and not config.ppo.kl.in_use:
            yield f"{key}.action: raise_kl has no KL term to strengthen: set ppo.kl.in_reward or loss_coef"


def best_findings(config: Config) -> Iterator[str]:
    """The metric by which the best checkpoint is told."""
    best, key = config.run.keep_best, "run.keep_best.metric"
    if best is None:
        return
    kind = family(best.metric)
    if kind not in VALIDATION:
        yield (
            f"{key}: {best.metric} is no metric of a validation: give one such as val-core/SOURCE/acc/mean@1, as the "
            "log has it"
        )
        return
    yield from under(key, _sample_problem(config, best.metric))
    source = "canary" if kind == "canary" else "validation"
    if not getattr(config.data, source):
        yield f"{key}: {best.metric} is never logged without data.{source}: name files there"
    elif not config.run.validate_every:
        yield Advice(f"{key}: {best.metric} is logged at the end only: set run.validate_every")


def _sample_problem(config: Config, metric: str) -> Iterator[str]:
    """Whether what is said of n samples is said of as many as a validation draws."""
    samples = config.roles.rollout.validation_samples
    if right := wrong_samples(metric, samples):
        yield f"{metric} is never logged, as roles.rollout.validation_samples is {samples}: write {right}"


_OF_THE_CRITIC = ("critic/v", "critic/returns", "critic/grad_norm", "critic/lr")


def _gspo_findings(ppo: PPOConfig) -> Iterator[str]:
    """Defaults of PPO that are not GSPO's."""
    if ppo.aggregation != "seq_mean_token_mean":
        yield Advice(
            f"ppo.aggregation: {ppo.aggregation} weighs a response's ratio by its length; the paper's gspo is "
            "seq_mean_token_mean: set that"
        )
    if ppo.clip > 0.01:
        yield Advice(
            f"ppo.clip: {ppo.clip} is wide for the ratio of a whole response, so that gspo clips nothing: the paper "
            "has clip 3e-4 and clip_high 4e-4"
        )
