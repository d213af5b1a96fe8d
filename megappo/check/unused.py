"""Keys that were given a value, and that nothing reads in a run of this configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, is_dataclass
from typing import Any, NamedTuple

from megappo.check.findings import Advice, shown
from megappo.check.reward_functions import reward_lacks
from megappo.config import Config, SupervisedConfig
from megappo.strict_yaml import fields_of, is_required


class Use(NamedTuple):
    """When a key is read: ``is_read(config, section)``, the section being the one that has the key; and when not, in
    words."""

    is_read: Callable[[Any, Any], bool]
    but: str
    fix: str = "leave it out"


def unused_findings(config: Config | SupervisedConfig) -> Iterator[Advice]:
    """Every key with another value than its default that has no effect."""
    yield from _unused(config, config, "", "", TRAINING if isinstance(config, Config) else SUPERVISED)


def _unused(config: Any, section: Any, key: str, kind: str, uses: Mapping[str, Use]) -> Iterator[Advice]:
    """Of a section and those in it.

    Args:
        kind: its key, with NAME for names of choice.
    """
    cls: Any = type(section)
    for name, (_, item) in fields_of(cls).items():
        value, here, use = getattr(section, name), f"{key}{name}", uses.get(f"{kind}{name}")
        if use is not None and value != _default(item) and not use.is_read(config, section):
            given = "" if is_dataclass(value) else f"{shown(value)} "
            yield Advice(f"{here}: {given}has no effect{',' * use.but.startswith('as ')} {use.but}: {use.fix}")
        elif is_dataclass(value):
            yield from _unused(config, value, f"{here}.", f"{kind}{name}.", uses)
        elif isinstance(value, Mapping):
            for own, part in value.items():
                if is_dataclass(part):
                    yield from _unused(config, part, f"{here}.{own}.", f"{kind}{name}.NAME.", uses)


def _default(item: Field[Any]) -> Any:
    if is_required(item):
        return MISSING
    return item.default if item.default_factory is MISSING else item.default_factory()


def _validates(config: Config, _: Any) -> bool:
    return bool(config.data.validation or config.data.canary)


def _draws_validation(config: Config, _: Any) -> bool:
    return config.roles.rollout.validation_temperature > 0


def _has_critic(config: Config, _: Any) -> bool:
    return config.ppo.needs_critic


def _takes_turns(config: Config, _: Any) -> bool:
    pools = [role.pool for role in config.roles.megatron.values()]
    return config.roles.rollout.pool in pools and config.run.device == "cuda"


def _runs_code(config: Config, _: Any) -> bool:
    """Whether a reward function takes the sandbox, as far as it can be seen."""
    reward = config.roles.reward
    functions = [*([reward.function] if reward.function else []), *reward.by_source.values()]
    return not all(reward_lacks(function, "sandbox") for function in functions)


_NO_VALIDATION = "without data.validation or canary"
_GREEDY = "as roles.rollout.validation_temperature 0 is greedy"
_NO_CRITIC = "without a critic"
_CONSTANT = "with the constant schedule"

ANY: Mapping[str, Use] = {
    "run.upload_timeout_s": Use(lambda c, _: c.run.is_remote, "while run.dir is a folder here"),
}
"""Keys that both kinds of configuration have."""

TRAINING: Mapping[str, Use] = {
    **ANY,
    "run.validate_every": Use(_validates, "without data.validation", "name files there"),
    "run.validate_before": Use(_validates, _NO_VALIDATION),
    "data.validation_prompts": Use(lambda c, _: bool(c.data.validation), "without data.validation"),
    "data.shuffle": Use(lambda c, _: not c.data.replay, "with data.replay"),
    "roles.rollout.memory_fraction": Use(lambda c, _: c.run.device == "cuda", "on CPU"),
    "roles.rollout.kv_cache_gib": Use(lambda c, _: c.run.device == "cpu", "on GPUs", "set memory_fraction instead"),
    "roles.rollout.sleep": Use(_takes_turns, "as the engines share no GPU with other roles"),
    "roles.rollout.validation_temperature": Use(_validates, _NO_VALIDATION),
    "roles.rollout.validation_top_p": Use(_draws_validation, _GREEDY, "give a number > 0 there, or leave it out"),
    "roles.rollout.validation_top_k": Use(_draws_validation, _GREEDY, "give a number > 0 there, or leave it out"),
    "roles.rollout.validation_samples": Use(_validates, _NO_VALIDATION),
    "roles.reward.timeout_s": Use(lambda c, reward: reward.has_functions, "without a reward function"),
    "roles.reward.processes": Use(lambda c, reward: reward.has_functions, "without a reward function"),
    "roles.reward.sandbox": Use(_runs_code, "as no reward function takes the sandbox"),
    "roles.reward.sandbox.processes": Use(lambda c, sandbox: sandbox.kind == "local", "but with kind local"),
    "roles.reward.weights.function": Use(lambda c, _: c.roles.reward.has_functions, "without a reward function"),
    "roles.reward.weights.model": Use(lambda c, _: c.roles.reward.pool is not None, "without a reward model"),
    "roles.reward.weights_by_source.NAME.function": Use(
        lambda c, _: c.roles.reward.has_functions, "without a reward function"
    ),
    "roles.reward.weights_by_source.NAME.model": Use(
        lambda c, _: c.roles.reward.pool is not None, "without a reward model"
    ),
    "roles.reward.length_penalty.after": Use(lambda c, penalty: penalty.per_token > 0, "without per_token"),
    "ppo.gamma": Use(
        lambda c, ppo: ppo.estimator in ("gae", "reinforce_plus_plus"),
        "but with ppo.estimator gae or reinforce_plus_plus",
    ),
    "ppo.lam": Use(_has_critic, _NO_CRITIC),
    "ppo.dual_clip": Use(lambda c, ppo: ppo.loss == "ppo", "but with ppo.loss ppo"),
    "ppo.value_clip": Use(_has_critic, _NO_CRITIC),
    "ppo.critic_lr": Use(_has_critic, _NO_CRITIC),
    "ppo.critic_updates": Use(_has_critic, _NO_CRITIC),
    "ppo.critic_optimizer": Use(_has_critic, _NO_CRITIC),
    "ppo.dynamic_sampling": Use(lambda c, _: not c.data.replay, "with data.replay"),
    "ppo.kl.coef": Use(lambda c, kl: kl.in_reward, "without ppo.kl.in_reward"),
    "ppo.kl.estimator": Use(
        lambda c, kl: kl.in_reward or c.roles.reference is not None or c.reference_is_base, "without a reference"
    ),
    "ppo.kl.target": Use(lambda c, kl: kl.in_reward, "without ppo.kl.in_reward"),
    "ppo.kl.horizon": Use(lambda c, kl: kl.in_reward and kl.target is not None, "without ppo.kl.in_reward and target"),
    "ppo.kl.loss_estimator": Use(lambda c, kl: kl.loss_coef > 0, "without ppo.kl.loss_coef"),
    "ppo.correction.threshold": Use(
        lambda c, _: c.ppo.correction_level != "off",
        "while ppo.correction.level is off, as it is by default without ppo.staleness",
    ),
    "ppo.optimizer.min_lr_ratio": Use(lambda c, optimizer: optimizer.schedule != "constant", _CONSTANT),
    "ppo.critic_optimizer.min_lr_ratio": Use(lambda c, optimizer: optimizer.schedule != "constant", _CONSTANT),
    "ppo.guards.NAME.factor": Use(
        lambda c, guard: guard.action in ("lower_lr", "raise_kl"), "but with action lower_lr or raise_kl"
    ),
}
"""Keys of ``megappo train`` that are not read in every run; what is an error is with its like."""

SUPERVISED: Mapping[str, Use] = {
    **ANY,
    "run.validate_every": Use(lambda c, _: bool(c.data.validation), "without data.validation", "name files there"),
    "run.validate_before": Use(lambda c, _: bool(c.data.validation), "without data.validation"),
    "run.peak_tflops": Use(lambda c, _: False, "as only PPO logs perf/mfu"),
    "run.restarts": Use(
        lambda c, _: False,
        "as only PPO starts over by itself",
        "leave it out, and start the run again after a loss; it goes on from its last checkpoint",
    ),
    "run.dump_rollouts": Use(lambda c, _: False, "as nothing is generated"),
    "optimizer.min_lr_ratio": Use(lambda c, optimizer: optimizer.schedule != "constant", _CONSTANT),
}
"""Keys of ``megappo reward-train`` and ``megappo sft``."""
