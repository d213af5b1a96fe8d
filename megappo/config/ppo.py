"""The algorithm: estimators, losses, KL, correction, optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megappo.config.guards import GuardConfig
from megappo.strict_yaml import key

KLEstimator = Literal["k1", "k2", "k3"]

Estimator = Literal["gae", "grpo", "dr_grpo", "rloo", "remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    in_reward: bool = key("take the KL penalty off the token rewards", True)
    coef: float = key("(first) coefficient of the penalty in the reward", 0.001, at_least=0)
    estimator: KLEstimator = key("KL estimator in the reward, and of actor/reward_kl_penalty", "k1")
    target: float | None = key("KL per response that an adaptive coefficient steers to; null: fixed", None, above=0)
    horizon: int = key("responses over which the adaptive coefficient adjusts", 10000, at_least=1)
    loss_coef: float = key("coefficient of a KL term in the actor's loss; 0: none", 0.0, at_least=0)
    loss_estimator: KLEstimator = key("KL estimator in the loss; the gradient of k1 is 0 on average", "k3")

    @property
    def in_use(self) -> bool:
        """Whether any KL term needs the reference."""
        return self.in_reward or self.loss_coef > 0


@dataclass(frozen=True, kw_only=True)
class CorrectionConfig:
    """Importance weights for the difference between the log-probabilities of the engines, or of older weights, and the
    actor's before its update."""

    level: Literal["off", "token", "sequence"] | None = key(
        "weigh each token, each response, or only log the difference; null: token with ppo.staleness, else off", None
    )
    threshold: float = key("largest weight", 2.0, above=0)


@dataclass(frozen=True, kw_only=True)
class OverlongConfig:
    """A penalty on the score that grows over the last tokens before data.max_response, as DAPO's."""

    buffer: int = key("tokens before data.max_response over which the penalty grows", at_least=1)
    penalty: float = key("the penalty at data.max_response", 1.0, above=0)


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingConfig:
    """Prompts whose responses all score the same are replaced by further ones, as DAPO's."""

    max_rounds: int = key(
        "rounds of sampling in one step; what is missing then is filled up with such prompts", 10, at_least=1
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    weight_decay: float = key("AdamW's weight decay", 0.01, at_least=0)
    beta1: float = key("AdamW's first decay rate", 0.9, at_least=0, below=1)
    beta2: float = key("AdamW's second decay rate", 0.999, at_least=0, below=1)
    eps: float = key("AdamW's epsilon", 1e-8, above=0)
    grad_clip: float = key("largest global gradient norm", 1.0, above=0)
    warmup_steps: int = key("steps of linear learning rate warm-up", 0, at_least=0)
    schedule: Literal["constant", "linear", "cosine"] = key("learning rate after the warm-up", "constant")
    min_lr_ratio: float = key("last learning rate over the peak", 0.0, at_least=0, at_most=1)


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    estimator: Estimator = key(
        "where advantages come from: a critic (gae), the other responses to the prompt (grpo, dr_grpo, rloo, "
        "reinforce_plus_plus_baseline), a greedy response to it (remax), or the rewards alone (reinforce_plus_plus)",
        "gae",
    )
    loss: Literal["ppo", "gspo", "cispo"] = key(
        "what the actor minimises: each token's ratio clipped (ppo), each response's (gspo), or log-probabilities "
        "weighted by the clipped ratio (cispo)",
        "ppo",
    )
    gamma: float = key("discount", 1.0, at_least=0, at_most=1)
    lam: float = key("lambda of generalised advantage estimation", 0.95, at_least=0, at_most=1)
    clip: float = key("ratio clipping below: 1 - clip", 0.2, above=0, at_most=1)
    clip_high: float | None = key("ratio clipping above: 1 + clip_high; null: the same as clip", None, above=0)
    dual_clip: float | None = key("bound of loss ppo's ratio where advantages are negative; null: none", 3.0, above=1)
    value_clip: float | None = key("clipping of value changes; null: none", 0.2, above=0)
    entropy_coef: float = key("coefficient of the entropy bonus", 0.0, at_least=0)
    whiten_advantages: bool | None = key(
        "give advantages mean 0 and variance 1 over the batch; null: for gae, reinforce_plus_plus and "
        "reinforce_plus_plus_baseline",
        None,
    )
    aggregation: Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean"] = key(
        "how the loss is averaged over a mini-batch", "token_mean"
    )
    mini_batch: int = key("responses of one optimizer step, over all ranks", at_least=1)
    epochs: int = key("passes over each step's batch", 1, at_least=1)
    critic_updates: int = key("passes of the critic for each pass of the actor", 1, at_least=1)
    critic_warmup: int = key(
        "first steps in which only the critic trains; the actor's schedule begins after them", 0, at_least=0
    )
    actor_lr: float = key("peak learning rate of the actor", at_least=0)
    critic_lr: float | None = key("peak learning rate of the critic", None, at_least=0)
    staleness: int = key(
        "steps by which responses may be older than the weights that train on them; 0: generate, then train; 1: the "
        "next batch generates while this one trains; N: up to N batches ahead, and responses that a weight sync "
        "interrupts go on after it",
        0,
        at_least=0,
    )
    overlong: OverlongConfig | None = key(
        "penalty on responses near data.max_response (of long prompts: data.overlong); null: none", None
    )
    mask_truncated: bool = key(
        "leave responses that were cut at data.max_response out of the losses of actor and critic, as DAPO's overlong "
        "filtering; false: they count as ended there, with a value of 0 after their last token",
        False,
    )
    dynamic_sampling: DynamicSamplingConfig | None = key(
        "train on prompts whose responses differ in score only; null: on all", None
    )
    kl: KLConfig = key("KL against the reference", KLConfig())
    correction: CorrectionConfig = key("correction of off-policy responses", CorrectionConfig())
    optimizer: OptimizerConfig = key("AdamW and its schedule", OptimizerConfig())
    critic_optimizer: OptimizerConfig | None = key("the critic's own; null: as optimizer", None)
    guards: Mapping[str, GuardConfig] = key("limits on metrics, by a name of your own", {})

    def passes(self, role: str) -> int:
        """Passes of a trained role over a step's batch."""
        return self.epochs * (self.critic_updates if role == "critic" else 1)

    @property
    def optimizers(self) -> dict[str, OptimizerConfig]:
        """Of the trained roles, by name."""
        return {"actor": self.optimizer, "critic": self.critic_optimizer or self.optimizer}

    @property
    def streams(self) -> bool:
        """Whether responses go on across weight syncs."""
        return self.staleness > 1

    @property
    def correction_level(self) -> str:
        """What is weighed for being off-policy: "off", "token" or "sequence"."""
        by_default = "token" if self.staleness else "off"
        return self.correction.level or by_default

    @property
    def needs_critic(self) -> bool:
        """Whether advantages come from values."""
        return self.estimator == "gae"

    @property
    def compares_responses(self) -> bool:
        """Whether advantages come from several responses to a prompt."""
        return self.estimator not in ("gae", "remax", "reinforce_plus_plus")

    @property
    def needs_greedy(self) -> bool:
        """Whether advantages take a greedy response to each prompt."""
        return self.estimator == "remax"

    @property
    def greedy_columns(self) -> tuple[str, ...]:
        """What advantages take of the greedy response to each prompt."""
        lengths = () if self.overlong is None else ("baseline_tokens",)
        return ("baseline", "baseline_failed", *lengths) if self.needs_greedy else ()

    @property
    def whitens(self) -> bool:
        """Whether advantages are whitened: as the estimator's paper has it, unless configured."""
        papers = self.estimator in ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
        return papers if self.whiten_advantages is None else self.whiten_advantages
