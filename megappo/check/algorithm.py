"""Sampling and the algorithm: what does not go together, and what is not as meant."""

from __future__ import annotations

from collections.abc import Iterator

from megappo.check.findings import Advice
from megappo.config import Config, PPOConfig


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


def ppo_findings(config: Config) -> Iterator[str]:
    """What the algorithm needs, and what is not as its papers have it."""
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
    if ppo.kl.loss_coef and ppo.kl.loss_estimator == "k1":
        yield Advice(
            "ppo.kl.loss_estimator: k1 as a loss has a gradient that is 0 on average, so that nothing holds the policy "
            "near the reference: set k2, whose gradient is that of KL(policy || reference), or k3"
        )
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
    if ppo.loss == "gspo":
        yield from _gspo_findings(ppo)
    if ppo.critic_warmup >= config.run.steps:
        yield Advice(
            f"ppo.critic_warmup: {ppo.critic_warmup} steps are all of run.steps, so that the actor never trains: "
            "lower it"
        )


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
