"""The configuration of a run: frozen dataclasses, one field a YAML key, read strictly from one YAML file.

Batch sizes count responses over all ranks; nothing is multiplied or divided behind the user's back.
"""
# ruff: noqa: RUF009 - `key` is `dataclasses.field` with a help text; defaults are frozen.

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from megappo.reward_reference import absolute_reference
from megappo.strict_yaml import Reader, dump, expected, fields_of, key, parse, to_plain

KLEstimator = Literal["k1", "k2", "k3"]
Recompute = Literal["none", "selective", "full"]
Fp8 = Literal["none", "tensorwise", "blockwise"]
Offload = Literal["none", "optimizer", "all"]
Estimator = Literal["gae", "grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
Verify = Literal["off", "sample", "full"]
Carrier = Literal["auto", "gloo"]
Sleep = Literal["off", "offload", "drop"]


class ConfigError(ValueError):
    """A configuration that cannot be used.

    Attributes:
        problems: every problem, one line each, with its fix.
        partial: what could be read, refused values at their defaults; None where a required key has no value.
        doubtful: the keys in ``partial`` whose values are not what the user meant.
    """

    def __init__(self, problems: Sequence[str], partial: Config | None = None, doubtful: Sequence[str] = ()) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)
        self.partial = partial
        self.doubtful = frozenset(doubtful)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    dir: str = key("folder of everything the run leaves; a run resumes from it")
    steps: int = key("training steps in all", at_least=1)
    seed: int = key("seed of data order, mini-batches and sampling", 1, at_least=0)
    save_every: int = key("steps between checkpoints; 0: only at the end", 0, at_least=0)
    keep_checkpoints: int = key("number of latest checkpoints kept", 2, at_least=1)
    validate_every: int = key("steps between validations; 0: only before and after", 0, at_least=0)
    validate_before: bool = key("validate before the first step", True)
    trackers: tuple[Literal["tensorboard"], ...] = key("where metrics go besides log.jsonl", ())
    device: Literal["cuda", "cpu"] = key("what the workers run on", "cuda")
    dtype: Literal["bfloat16", "float32"] = key("type of weights and activations", "bfloat16")
    peak_tflops: float | None = key("a device's matrix peak, for MFU; null: by its name", None, above=0)
    device_profile: str = key("what plan takes a device for: H200, H100, A100, or a YAML file", "H200")
    timeout_s: float = key("seconds any one remote call or collective may take", 1800.0, above=0)
    dump_rollouts: bool = key("write every step's batch to RUN/rollouts", True)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    train: tuple[str, ...] = key("parquet files to train on")
    validation: tuple[str, ...] = key("parquet files to validate on", ())
    prompts_per_step: int = key("prompts of one training step", at_least=1)
    max_prompt: int = key("longest prompt, in tokens", at_least=1)
    max_response: int = key("longest response, in tokens", at_least=1)
    overlong: Literal["filter", "cut"] = key(
        "longer prompts: leave out, or keep their last max_prompt tokens", "filter"
    )
    shuffle: bool = key("shuffle the prompts of each epoch", True)
    validation_prompts: int = key("validation prompts used; 0: all", 0, at_least=0)


@dataclass(frozen=True, kw_only=True)
class PoolConfig:
    nodes: int = key("machines", 1, at_least=1)
    devices_per_node: int = key("devices on each machine", at_least=1)

    @property
    def devices(self) -> int:
        """Devices on all machines together."""
        return self.nodes * self.devices_per_node


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


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    in_reward: bool = key("take the KL penalty off the token rewards", True)
    coef: float = key("(first) coefficient of the penalty in the reward", 0.001, at_least=0)
    estimator: KLEstimator = key("KL estimator in the reward", "k1")
    target: float | None = key("KL per response that an adaptive coefficient steers to; null: fixed", None, above=0)
    horizon: int = key("responses over which the adaptive coefficient adjusts", 10000, at_least=1)
    loss_coef: float = key("coefficient of a KL term in the actor's loss; 0: none", 0.0, at_least=0)
    loss_estimator: KLEstimator = key("KL estimator in the loss", "k3")

    @property
    def in_use(self) -> bool:
        """Whether any KL term needs the reference."""
        return self.in_reward or self.loss_coef > 0


@dataclass(frozen=True, kw_only=True)
class CorrectionConfig:
    """Importance weights for the difference between the engines' log-probabilities and the actor's."""

    level: Literal["off", "token", "sequence"] = key(
        "weigh each token, each response, or only log the difference", "off"
    )
    threshold: float = key("largest weight", 2.0, above=0)


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
        "reinforce_plus_plus_baseline), or the rewards alone (reinforce_plus_plus)",
        "gae",
    )
    gamma: float = key("discount", 1.0, at_least=0, at_most=1)
    lam: float = key("lambda of generalised advantage estimation", 0.95, at_least=0, at_most=1)
    clip: float = key("ratio clipping below: 1 - clip", 0.2, above=0, at_most=1)
    clip_high: float | None = key("ratio clipping above: 1 + clip_high; null: the same as clip", None, above=0)
    dual_clip: float | None = key("bound of the ratio where advantages are negative; null: none", 3.0, above=1)
    value_clip: float | None = key("clipping of value changes; null: none", 0.2, above=0)
    entropy_coef: float = key("coefficient of the entropy bonus", 0.0, at_least=0)
    whiten_advantages: bool | None = key(
        "give advantages mean 0 and variance 1 over the batch; null: for gae and reinforce_plus_plus", None
    )
    aggregation: Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean"] = key(
        "how the loss is averaged over a mini-batch", "token_mean"
    )
    mini_batch: int = key("responses of one optimizer step, over all ranks", at_least=1)
    epochs: int = key("passes over each step's batch", 1, at_least=1)
    critic_warmup: int = key("first steps in which only the critic trains", 0, at_least=0)
    actor_lr: float = key("peak learning rate of the actor", at_least=0)
    critic_lr: float | None = key("peak learning rate of the critic", None, at_least=0)
    kl: KLConfig = key("KL against the reference", KLConfig())
    correction: CorrectionConfig = key("correction of off-policy responses", CorrectionConfig())
    optimizer: OptimizerConfig = key("AdamW and its schedule", OptimizerConfig())

    @property
    def needs_critic(self) -> bool:
        """Whether advantages come from values."""
        return self.estimator == "gae"

    @property
    def compares_responses(self) -> bool:
        """Whether advantages come from several responses to a prompt."""
        return self.estimator not in ("gae", "reinforce_plus_plus")

    @property
    def whitens(self) -> bool:
        """Whether advantages are whitened: as the estimator's paper has it, unless configured."""
        papers = self.estimator in ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
        return papers if self.whiten_advantages is None else self.whiten_advantages


@dataclass(frozen=True, kw_only=True)
class Config:
    run: RunConfig = key("the run")
    model: str = key("Hugging Face model folder")
    data: DataConfig = key("prompts")
    pools: Mapping[str, PoolConfig] = key("named sets of devices")
    roles: RolesConfig = key("who runs where")
    ppo: PPOConfig = key("the algorithm")

    def model_folder(self, role: str) -> str:
        """Absolute path of the model folder of a Megatron role: its own, or the common one.

        The actor's is also that of the engines, the tokenizer, the chat template and the end-of-text tokens.
        """
        return os.path.abspath(self.roles.megatron[role].model or self.model)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, with ``key=value`` overrides (dotted keys, values in YAML) on top.

    Raises:
        ConfigError: listing every unknown key, wrong type, value out of range, missing key and duplicate at once.
    """
    problems: list[str] = []
    raw = _read(path, problems)
    if not isinstance(raw, dict):
        raise ConfigError(problems or [f"{path}: holds no mapping: give sections {', '.join(fields_of(Config))}"])
    for text in overrides:
        _override(raw, text, problems)
    reader = Reader()
    config = reader.section(Config, raw)
    problems += reader.problems
    if problems:
        raise ConfigError(problems, None if config is MISSING else config, tuple(reader.doubtful))
    return config


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML, every default written out; :func:`load_config` reads it back equal."""
    return dump(to_plain(config))


def describe_config() -> Iterator[tuple[str, str, str, str]]:
    """(dotted key, legal values, default or ``required``, help) of every key; ``NAME`` stands for a name of choice."""
    return _describe(Config, "")


def _describe(cls: Any, prefix: str) -> Iterator[tuple[str, str, str, str]]:
    for name, (hint, item) in fields_of(cls).items():
        section = next((part for part in (hint, *get_args(hint)) if is_dataclass(part)), None)
        if section:
            yield from _describe(section, f"{prefix}{name}.{'NAME.' if get_origin(hint) is Mapping else ''}")
            continue
        default = item.default_factory() if item.default_factory is not MISSING else item.default
        shown = "required" if default is MISSING else dump(to_plain(default)).removesuffix("...\n").strip()
        yield f"{prefix}{name}", expected(hint, item.metadata["range"]), shown, item.metadata["help"]


def _read(path: str | Path, problems: list[str]) -> Any:
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except FileNotFoundError:
        problems.append(f"{path}: no such file: give the path of a YAML file")
    except OSError as error:
        problems.append(f"{path}: cannot be read ({error.strerror}): give the path of a YAML file")
    except UnicodeDecodeError:
        problems.append(f"{path}: not UTF-8 text: give the path of a YAML file")
    else:
        found: list[str] = []
        raw = parse(text, found)
        # A file that does not parse is named; a key given twice names itself.
        problems += found if raw is not MISSING else [f"{path}: {problem}" for problem in found]
        return raw
    return None


def _override(raw: dict[str, Any], text: str, problems: list[str]) -> None:
    dotted, equals, value_text = text.partition("=")
    names = dotted.strip().split(".")
    if not equals or not all(names):
        problems.append(f"{text}: not an override: write key=value, for instance roles.rollout.tp=2")
        return
    found: list[str] = []
    value = parse(value_text, found)
    problems += [f"{text}: {problem}" for problem in found]
    if value is MISSING:
        return
    at = raw
    for depth, name in enumerate(names[:-1]):
        child = {} if at.get(name) is None else at[name]
        if not isinstance(child, dict):
            problems.append(f"{text}: {'.'.join(names[: depth + 1])} is no section: it has no keys to override")
            return
        at[name] = dict(child)  # a copy: an alias in the YAML shares one section between two keys
        at = at[name]
    at[names[-1]] = value
