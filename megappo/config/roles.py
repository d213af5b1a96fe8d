"""Who runs where, and how: the Megatron roles, the engines and the rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from megappo.reward_reference import absolute_reference
from megappo.strict_yaml import key

Recompute = Literal["none", "selective", "full"]

Fp8 = Literal["none", "tensorwise", "blockwise"]

Offload = Literal["none", "optimizer", "all"]

Verify = Literal["off", "sample", "full"]

Carrier = Literal["auto", "gloo"]

Sleep = Literal["off", "offload", "drop"]


@dataclass(frozen=True, kw_only=True)
class MegatronRoleConfig:
    """A role on Megatron ranks. Its data-parallel size is what is left of the pool: devices / (tp * pp)."""

    pool: str = key("name of the pool it runs in")
    tp: int = key("tensor parallel size", 1, at_least=1)
    pp: int = key("pipeline parallel size", 1, at_least=1)
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
    model: str | None = key("a model folder of its own", None)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """vLLM engines: as many as the pool has room for, each on ``tp`` devices."""

    pool: str = key("name of the pool it runs in")
    tp: int = key("tensor parallel size of one engine", 1, at_least=1)
    samples_per_prompt: int = key("responses sampled for each training prompt", 1, at_least=1)
    temperature: float = key("sampling temperature; 0: greedy", 1.0, at_least=0)
    top_p: float = key("probability mass that is sampled from", 1.0, above=0, at_most=1)
    top_k: int = key("number of likeliest tokens that are sampled from; -1: all", -1, at_least=-1)
    max_sequences: int = key("sequences one engine decodes at once", 256, at_least=1)
    memory_fraction: float = key("part of a GPU's memory that an engine may take", 0.9, above=0, at_most=1)
    kv_cache_gib: float = key("key/value cache of an engine on CPU, in GiB", 1.0, above=0)
    sleep: Sleep = key(
        "what an engine in a shared pool does with its weights while others work; its key/value cache goes in any case "
        "but off",
        "drop",
    )
    verify: Verify = key("checksums after each weight sync: none, of other regions each time, or of all", "sample")
    transport: Carrier = key("what carries new weights: chosen by where the ranks are, or gloo in any case", "auto")
    validation_temperature: float = key("sampling temperature in validation; 0: greedy", 0.0, at_least=0)
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
class RewardConfig:
    """Functions are ``package.module`` (holding ``compute_score``), ``package.module:name`` or ``file.py:name``."""

    function: str | None = key("reward function of all data sources that by_source does not name", None)
    by_source: Mapping[str, str] = key("reward function of each data_source", {})
    timeout_s: float = key("seconds one response may take to score", 10.0, above=0)
    processes: int = key("processes that score", 2, at_least=1)
    sandbox: SandboxConfig = key("where code that the model wrote runs", SandboxConfig())

    def absolute(self) -> RewardConfig:
        """The same with absolute paths of files, for a process that runs in another directory."""
        by_source = {source: absolute_reference(function) for source, function in self.by_source.items()}
        function = None if self.function is None else absolute_reference(self.function)
        return replace(self, function=function, by_source=by_source)


@dataclass(frozen=True, kw_only=True)
class RolesConfig:
    actor: MegatronRoleConfig = key("the policy that is trained")
    critic: MegatronRoleConfig | None = key("the value function that is trained, where ppo.estimator is gae", None)
    reference: MegatronRoleConfig | None = key("the frozen policy that KL terms compare with", None)
    rollout: RolloutConfig = key("the engines that generate")
    reward: RewardConfig = key("what scores a response")

    @property
    def megatron(self) -> dict[str, MegatronRoleConfig]:
        """The roles on Megatron ranks, by name."""
        roles = {"actor": self.actor, "critic": self.critic, "reference": self.reference}
        return {name: role for name, role in roles.items() if role is not None}
