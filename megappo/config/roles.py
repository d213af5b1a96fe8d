"""Who runs where, and how: the Megatron roles, the engines and the rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal

from megappo.reward_reference import absolute_reference
from megappo.strict_yaml import key

Recompute = Literal["none", "selective", "full"]

Fp8 = Literal["none", "tensorwise", "blockwise"]

Offload = Literal["none", "optimizer", "all"]

Verify = Literal["off", "sample", "full"]

Carrier = Literal["auto", "gloo"]

Normalize = Literal["none", "batch", "running"]

Sleep = Literal["off", "offload", "drop"]


TRAINED = frozenset({"actor", "critic"})
"""The Megatron roles that learn; the others only score."""

SCALAR_HEAD = frozenset({"critic", "reward"})
"""The Megatron roles whose model ends in one number a token."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters: the model's own weights are frozen, and only the adapters (and a scalar head) train."""

    rank: int = key("rank of the adapters", 16, at_least=1)
    alpha: float = key("adapters are scaled by alpha / rank", 32.0, above=0)
    targets: tuple[str, ...] = key("linear layers that get one, such as q_proj; or all-linear", ("all-linear",))


@dataclass(frozen=True, kw_only=True)
class MegatronSizes:
    """How a role is laid out on Megatron ranks. Its data-parallel size is what is left: devices / (tp * pp)."""

    pool: str | None = key("name of the pool that the reward model runs in; null: there is none", None)
    tp: int = key("tensor parallel size", 1, at_least=1)
    pp: int = key("pipeline parallel size", 1, at_least=1)
    vpp: int = key(
        "model chunks of each pipeline stage (virtual pipeline, interleaved 1F1B): less idle time, more messages",
        1,
        at_least=1,
    )
    sequence_parallel: bool = key("split activations along the sequence between tensor parallel ranks", False)
    micro_batch_tokens: int = key("token budget of one micro-batch", 16384, at_least=1)
    recompute: Recompute = key(
        "activations computed again in the backward pass: none, the MLP's, or all of each layer", "none"
    )
    fp8: Fp8 = key("matrix products of the layers in 8 bits: one scale a tensor, or one a block", "none")
    offload: Offload = key(
        "what waits in host memory while other roles use the devices: gradients and optimizer state, or weights too",
        "none",
    )
    lora: LoraConfig | None = key("train low-rank adapters instead of all weights; null: all weights", None)
    model: str | None = key("a model folder of its own", None)


@dataclass(frozen=True, kw_only=True)
class MegatronRoleConfig(MegatronSizes):
    """A role on all Megatron ranks of a pool."""

    pool: str = key("name of the pool it runs in")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """vLLM engines: as many as the pool has room for, each on ``tp`` devices."""

    pool: str = key("name of the pool it runs in")
    tp: int = key("tensor parallel size of one engine", 1, at_least=1)
    samples_per_prompt: int = key("responses sampled for each training prompt", 1, at_least=1)
    temperature: float = key("sampling temperature; 0: greedy", 1.0, at_least=0)
    top_p: float = key("probability mass that is sampled from", 1.0, above=0, at_most=1)
    top_k: int = key("number of likeliest tokens that are sampled from; -1: all", -1, at_least=-1)
    stop_token_ids: tuple[int, ...] = key(
        "tokens that end a response, besides those that the model's generation_config.json, config.json and tokenizer "
        "name",
        (),
        at_least=0,
    )
    max_sequences: int = key("sequences one engine decodes at once", 256, at_least=1)
    memory_fraction: float = key("part of a GPU's memory that an engine may take", 0.9, above=0, at_most=1)
    kv_cache_gib: float = key("key/value cache of an engine on CPU, in GiB", 1.0, above=0)
    sleep: Sleep = key(
        "what an engine in a shared pool does with its weights while others work; its key/value cache goes in any case "
        "but off",
        "drop",
    )
    verify: Verify = key(
        "checksums after each weight sync: none; of all at the first, then of other regions each time; always of all",
        "sample",
    )
    transport: Carrier = key("what carries new weights: chosen by where the ranks are, or gloo in any case", "auto")
    validation_temperature: float = key("sampling temperature in validation; 0: greedy", 0.0, at_least=0)
    validation_top_p: float = key("probability mass that validation samples from", 1.0, above=0, at_most=1)
    validation_top_k: int = key("number of likeliest tokens that validation samples from; -1: all", -1, at_least=-1)
    validation_samples: int = key("responses sampled for each validation prompt", 1, at_least=1)


@dataclass(frozen=True, kw_only=True)
class SandboxConfig:
    """Where reward functions that take ``sandbox`` run the code that a model wrote."""

    kind: Literal["local", "http"] = key("bubblewrap on the machine that scores, or a SandboxFusion server", "local")
    url: str | None = key("the server's run_code, as http://host:8080/run_code", None)
    timeout_s: float = key("seconds one program may take", 5.0, above=0)
    memory_mb: int = key("MiB of each process, and of the scratch folder", 512, at_least=64)
    processes: int = key("processes and threads of one program", 16, at_least=1)
    output_kb: int = key("KiB one program may print", 64, at_least=1)


@dataclass(frozen=True, kw_only=True)
class RewardWeights:
    """What a score is made of; a part of weight 0 is not computed."""

    function: float = key("weight of the reward function's score", 1.0)
    model: float = key("weight of the reward model's score", 1.0)


@dataclass(frozen=True, kw_only=True)
class LengthPenaltyConfig:
    """Taken off the score: ``per_token`` for each token of a response beyond the first ``after``."""

    per_token: float = key("score that each further token costs; 0: none", 0.0, at_least=0)
    after: int = key("tokens of a response that cost nothing", 0, at_least=0)


@dataclass(frozen=True, kw_only=True)
class RewardConfig(MegatronSizes):
    """Functions are ``package.module`` (holding ``compute_score``), ``package.module:name`` or ``file.py:name``.

    With ``pool`` and ``model`` there is a reward model on Megatron ranks, beside the functions or instead of them.
    """

    function: str | None = key("reward function of all data sources that by_source does not name", None)
    by_source: Mapping[str, str] = key("reward function of each data_source", {})
    timeout_s: float = key("seconds one response may take to score", 10.0, above=0)
    processes: int = key("processes that score", 2, at_least=1)
    sandbox: SandboxConfig = key("where code that the model wrote runs", SandboxConfig())
    weights: RewardWeights = key("how functions and model make up a score", RewardWeights())
    weights_by_source: Mapping[str, RewardWeights] = key("the same for some data sources", {})
    length_penalty: LengthPenaltyConfig = key("what long responses cost", LengthPenaltyConfig())
    normalize: Normalize = key(
        "give scores mean 0 and variance 1 in training: over each batch, or over all steps so far", "none"
    )
    clip: float | None = key("largest size of a score in training, after normalize; null: any", None, above=0)

    @property
    def has_functions(self) -> bool:
        """Whether any reward function is named."""
        return self.function is not None or bool(self.by_source)

    @property
    def on_megatron(self) -> MegatronRoleConfig | None:
        """The reward model as a role, if there is one."""
        if self.pool is None:
            return None
        return MegatronRoleConfig(**{each.name: getattr(self, each.name) for each in fields(MegatronSizes)})

    def laid_out(self, role: MegatronRoleConfig) -> RewardConfig:
        """The same with the reward model on another pool, or in other sizes."""
        return replace(self, **{each.name: getattr(role, each.name) for each in fields(MegatronSizes)})

    def weights_of(self, source: str) -> RewardWeights:
        """Weights of what there is for a data source; 0 for what there is not."""
        wanted = self.weights_by_source.get(source, self.weights)
        has_function = self.function is not None or source in self.by_source
        return RewardWeights(
            function=wanted.function if has_function else 0.0, model=0.0 if self.pool is None else wanted.model
        )

    def absolute(self) -> RewardConfig:
        """The same with absolute paths of files, for a process that runs in another directory."""
        by_source = {source: absolute_reference(function) for source, function in self.by_source.items()}
        function = None if self.function is None else absolute_reference(self.function)
        return replace(self, function=function, by_source=by_source)


@dataclass(frozen=True, kw_only=True)
class RolesConfig:
    actor: MegatronRoleConfig = key("the policy that is trained")
    critic: MegatronRoleConfig | None = key("the value function that is trained, where ppo.estimator is gae", None)
    reference: MegatronRoleConfig | None = key(
        "the frozen policy that KL terms compare with; null: the actor without its adapters, if it has any", None
    )
    rollout: RolloutConfig = key("the engines that generate")
    reward: RewardConfig = key("what scores a response")

    @property
    def megatron(self) -> dict[str, MegatronRoleConfig]:
        """The roles on Megatron ranks, by name."""
        roles = {"actor": self.actor, "critic": self.critic, "reference": self.reference}
        roles["reward"] = self.reward.on_megatron
        return {name: role for name, role in roles.items() if role is not None}
