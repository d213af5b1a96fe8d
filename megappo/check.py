"""Everything about a run that can be known before it starts. No torch, Ray, vLLM or transformers is imported."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megappo import check_files
from megappo.config import Config, ConfigError, load_config
from megappo.layout import legality
from megappo.models.end_of_text import NAMED_IN, end_of_text_ids
from megappo.models.parameters import vllm_vocabulary
from megappo.models.spec import ModelError, ModelSpec, read_model_spec

VLLM_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that vLLM's attention knows on CPU (0.32, ``v1/attention/backends/cpu_attn.py``)."""

FIXED_ON_RESUME = (
    "run.seed",
    "data.train",
    "data.prompts_per_step",
    "data.max_prompt",
    "data.overlong",
    "data.shuffle",
    "roles.rollout.samples_per_prompt",
    "ppo.estimator",
    "ppo.mini_batch",
    "ppo.epochs",
)
"""Keys that a resumed run cannot change, besides the model of each role: the weights, the place in the data and the
schedule would not be its own. Pools and layouts may change, as may lengths, rates and everything about logging."""


@dataclass(frozen=True)
class Report:
    """What a check found: lines of the form ``key: value, why: fix``. Errors stop a run; warnings do not."""

    errors: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class _Warning(str):
    """A finding that does not stop a run."""


class _File(str):
    """A finding about files that a run needs, and that a plan can do without."""


def check_file(
    path: str | Path, overrides: Sequence[str] = (), *, planning: bool = False
) -> tuple[Config | None, Report]:
    """Load and check a configuration file, so that mistakes in the file and in what it names come out together.

    Returns the configuration (None if it has errors that keep it from being read) and the findings.

    Args:
        planning: files that a run needs may be missing (weights, tokenizer, data, rewards), which is a warning then.
    """
    try:
        config = load_config(path, overrides)
    except ConfigError as error:
        rest = check(error.partial, planning=planning) if error.partial else Report()
        # What a refused value made look wrong is not reported a second time.
        errors = tuple(line for line in rest.errors if line.split(":")[0] not in error.doubtful)
        warnings = tuple(line for line in rest.warnings if line.split(":")[0] not in error.doubtful)
        return None, Report((*error.problems, *errors), warnings)
    return config, check(config, planning=planning)


def check(config: Config, *, planning: bool = False) -> Report:
    """Check a configuration against itself, its model folders, its files and its run folder."""
    findings = list(_findings(config))
    mild = (_Warning, _File) if planning else _Warning
    errors = tuple(str(line) for line in findings if not isinstance(line, mild))
    return Report(errors, tuple(str(line) for line in findings if isinstance(line, mild)))


def _findings(config: Config) -> Iterator[str]:
    specs: dict[str, ModelSpec] = {}
    yield from _on_files(_run(config))
    yield from _models(config, specs)
    yield from _on_files(_end_of_text(config, specs))
    yield from _on_files(_data(config))
    yield from _pools(config)
    yield from _layouts(config, specs)
    yield from _lengths(config, specs)
    yield from _on_files(_reward(config))
    yield from _sandbox(config)
    yield from _reward_time(config)
    yield from _memory_saving(config, specs)
    yield from _sampling(config)
    yield from _ppo(config)


def _run(config: Config) -> Iterator[str]:
    run, folder = config.run, Path(config.run.dir)
    yield from _under("run.dir", check_files.run_folder_problems(folder))
    for tracker in run.trackers:
        if importlib.util.find_spec(tracker) is None:
            yield f"run.trackers: {tracker} is not installed: pip install {tracker}, or leave it out"
    steps = check_files.checkpoint_steps(folder)
    if not steps:
        return
    try:
        stored = load_config(folder / "config.yaml")
    except ConfigError as error:
        yield f"run.dir: {folder} holds checkpoints of a run that cannot be read ({error.problems[0]}): choose another"
        return
    for dotted, old, new in _changes(stored, config):
        yield (
            f"{dotted}: {_shown(new)} differs from {_shown(old)}, with which the run in {folder} began: "
            "set it back, or choose another run.dir"
        )
    schedule = config.ppo.optimizer.schedule
    if run.steps != stored.run.steps and schedule != "constant":
        yield _Warning(
            f"run.steps: {run.steps} differs from {stored.run.steps}, with which the run in {folder} went on so far: "
            f"the learning rate jumps, as the {schedule} schedule ends at the last step (a constant one does not)"
        )
    if steps[-1] >= run.steps:
        yield _Warning(
            f"run.steps: {run.steps} steps are done, as {folder} has a checkpoint of step {steps[-1]}: "
            "raise run.steps, or choose another run.dir"
        )


def _changes(stored: Config, config: Config) -> Iterator[tuple[str, Any, Any]]:
    """(key, old, new) of everything that a resumed run cannot change, and that changed."""
    models: dict[str, tuple[str, str]] = {}
    for name, role in config.roles.megatron.items():
        if name in stored.roles.megatron:  # a reference may come with a KL term, and go
            old, new = stored.model_folder(name), config.model_folder(name)
            if old != new:
                models[f"roles.{name}.model" if role.model else "model"] = (old, new)
    yield from ((dotted, *values) for dotted, values in models.items())
    yield from check_files.differences(stored, config, FIXED_ON_RESUME)


def _models(config: Config, specs: dict[str, ModelSpec]) -> Iterator[str]:
    """Check every model folder once, and put the readable ones into ``specs``."""
    refused: set[str] = set()
    for name, role in config.roles.megatron.items():
        folder = config.model_folder(name)
        label = f"roles.{name}.model" if role.model else "model"
        if folder not in specs and folder not in refused:
            try:
                specs[folder] = read_model_spec(folder)
            except ModelError as error:
                refused.add(folder)
                yield from _under(label, error.problems)
                continue
            if specs[folder].num_experts:
                yield (
                    f"{label}: {folder} is a mixture of experts ({specs[folder].family}), which can be planned and "
                    "converted but not yet trained: give a dense model"
                )
            shapes = specs[folder].hf_shapes()
            if name == "critic":
                shapes.pop("lm_head.weight", None)  # a value head takes its place
            yield from _on_files(_under(label, check_files.weight_problems(Path(folder), shapes)))
            if name == "actor":
                yield from _on_files(_under(label, check_files.tokenizer_problems(Path(folder))))
    actor = specs.get(config.model_folder("actor"))
    for name, role in config.roles.megatron.items():
        spec = specs.get(config.model_folder(name))
        if actor is None or spec is None or spec.vocab_size == actor.vocab_size:
            continue
        if name == "reference" or spec.vocab_size < actor.vocab_size:
            yield (
                f"roles.{name}.model: {role.model} has a vocabulary of {spec.vocab_size} tokens, the actor's has "
                f"{actor.vocab_size}: give a model with the actor's tokenizer"
            )


def _end_of_text(config: Config, specs: Mapping[str, ModelSpec]) -> Iterator[str]:
    folder = config.model_folder("actor")
    if folder not in specs:  # which is an error already
        return
    label = "roles.actor.model" if config.roles.actor.model else "model"
    try:
        if not end_of_text_ids(folder):
            yield (
                f"{label}: {folder}: has no end-of-text token, so that responses would never stop: give eos_token_id "
                f"in {' or '.join(NAMED_IN)}, or eos_token in tokenizer_config.json"
            )
    except ValueError as error:
        yield f"{label}: {error}"


def _data(config: Config) -> Iterator[str]:
    data = config.data
    if not data.train:
        yield "data.train: empty: give at least one parquet file"
    rows = {"train": 0, "validation": 0}
    chat = []
    for split, paths in (("train", data.train), ("validation", data.validation)):
        for path in paths:
            try:
                file = check_files.read_prompt_file(Path(path))
            except ValueError as error:
                yield f"data.{split}: {error}"
                continue
            rows[split] += file.rows
            chat += [(split, path)] * file.chat
    folder = Path(config.model_folder("actor"))
    if chat and folder.is_dir() and not check_files.has_chat_template(folder):
        split, path = chat[0]
        yield (
            f"data.{split}: {path}: its prompts are chat messages, and {folder} has no chat template: "
            "add chat_template.jinja there, or write prompts as strings"
        )
    if 0 < rows["train"] < data.prompts_per_step:
        yield _Warning(
            f"data.prompts_per_step: {data.prompts_per_step} is more than the {rows['train']} prompts of data.train: "
            "every step repeats prompts"
        )
    if data.validation and 0 < rows["validation"] < data.validation_prompts:
        yield _Warning(
            f"data.validation_prompts: {data.validation_prompts} is more than the {rows['validation']} prompts of "
            "data.validation: all are used"
        )
    if config.run.validate_every and not data.validation:
        yield _Warning(
            f"run.validate_every: {config.run.validate_every} has no effect without data.validation: name files there"
        )


def _pools(config: Config) -> Iterator[str]:
    named = {name: role.pool for name, role in config.roles.megatron.items()}
    rollout = config.roles.rollout.pool
    for name, pool in {**named, "rollout": rollout}.items():
        if pool not in config.pools:
            yield f"roles.{name}.pool: {pool!r} is not a pool: pools are {', '.join(config.pools) or 'none'}"
    sharing = [name for name, role in config.roles.megatron.items() if role.pool == rollout and role.offload == "none"]
    if sharing and config.run.device == "cuda" and config.roles.rollout.memory_fraction > 0.8:
        yield _Warning(
            f"roles.rollout.memory_fraction: {config.roles.rollout.memory_fraction} leaves little of the devices to "
            f"{' and '.join(sharing)}, whose pool the engines share: around 0.5 is usual"
        )
    for pool in config.pools:
        if pool not in (*named.values(), rollout):
            yield _Warning(f"pools.{pool}: no role uses it: leave it out, or name it as a role's pool")


def _layouts(config: Config, specs: Mapping[str, ModelSpec]) -> Iterator[str]:
    for name, role in config.roles.megatron.items():
        spec, pool = specs.get(config.model_folder(name)), config.pools.get(role.pool)
        prefix = f"roles.{name}"
        if spec:
            yield from _under(prefix, legality.megatron_model_problems(spec, role.tp, role.pp), ".")
            for line in legality.pipeline_warnings(spec, role.pp):
                yield _Warning(f"{prefix}.{line}")
        yield from _under(prefix, legality.megatron_size_problems(role.tp, role.sequence_parallel), ".")
        if pool:
            shape = (pool.nodes, pool.devices_per_node)
            yield from _under(prefix, legality.megatron_pool_problems(role.tp, role.pp, *shape), ".")
            for line in legality.megatron_pool_warnings(role.tp, *shape):
                yield _Warning(f"{prefix}.{line}")
            ranks = pool.devices // (role.tp * role.pp)
            if config.ppo.mini_batch < ranks and name != "reference":
                yield _Warning(
                    f"ppo.mini_batch: {config.ppo.mini_batch} responses leave some of the {name}'s {ranks} "
                    "data-parallel ranks without work: raise it, or tp or pp"
                )
    rollout = config.roles.rollout
    spec, pool = specs.get(config.model_folder("actor")), config.pools.get(rollout.pool)
    if spec:
        vocabulary = vllm_vocabulary(spec.vocab_size)
        yield from _under("roles.rollout", legality.rollout_model_problems(spec, vocabulary, rollout.tp), ".")
        if config.run.device == "cpu" and spec.head_dim not in VLLM_CPU_HEAD_SIZES:
            yield (
                f"run.device: cpu: vLLM has no attention there for the head size {spec.head_dim} of "
                f"{config.model_folder('actor')}, only for {', '.join(map(str, VLLM_CPU_HEAD_SIZES))}: give another "
                "model, or set cuda"
            )
    if pool:
        yield from _under("roles.rollout", legality.rollout_pool_problems(rollout.tp, pool.devices_per_node), ".")


def _memory_saving(config: Config, specs: Mapping[str, ModelSpec]) -> Iterator[str]:
    """What a role trades for memory: 8-bit products, recomputed activations, memory that leaves between turns."""
    rollout = config.roles.rollout.pool
    for name, role in config.roles.megatron.items():
        if role.fp8 != "none":
            if config.run.device == "cpu" or config.run.dtype != "bfloat16":
                wanted = f"run.device {config.run.device} and run.dtype {config.run.dtype}"
                yield f"roles.{name}.fp8: {role.fp8} needs CUDA and bfloat16, not {wanted}: set none, or these"
            if spec := specs.get(config.model_folder(name)):
                yield from _under(f"roles.{name}", legality.fp8_problems(spec, role.tp), ".")
        if role.recompute != "none" and name == "reference":
            yield _Warning(
                f"roles.reference.recompute: {role.recompute} has no effect, as it never trains: leave it out"
            )
        others = [other for other, its in config.roles.megatron.items() if its.pool == role.pool and other != name]
        if role.offload != "none" and not others and role.pool != rollout:
            yield _Warning(
                f"roles.{name}.offload: {role.offload} costs time and makes room for nobody, as no other role uses the "
                f"pool {role.pool}: set none"
            )


def _lengths(config: Config, specs: Mapping[str, ModelSpec]) -> Iterator[str]:
    data = config.data
    longest = data.max_prompt + data.max_response
    for folder, spec in specs.items():
        if longest > spec.max_positions:
            yield (
                f"data.max_response: {data.max_response} plus max_prompt {data.max_prompt} is more than the "
                f"{spec.max_positions} positions of {folder}: lower one by {longest - spec.max_positions}"
            )
    for name, role in config.roles.megatron.items():
        if role.micro_batch_tokens < longest:
            yield (
                f"roles.{name}.micro_batch_tokens: {role.micro_batch_tokens} does not hold one sequence of "
                f"{longest} tokens (data.max_prompt + data.max_response): give at least {longest}"
            )


def _reward(config: Config) -> Iterator[str]:
    reward = config.roles.reward
    if reward.function is None and not reward.by_source:
        yield "roles.reward.function: missing: give package.module:name or file.py:name, or fill by_source"
    if reward.function is not None:
        yield from _under("roles.reward.function", check_files.reward_problems(reward.function))
    elif reward.by_source:
        known = ", ".join(reward.by_source)
        for path in (*config.data.train, *config.data.validation):
            for source in sorted(check_files.data_sources(Path(path)) - set(reward.by_source)):
                yield (
                    f"roles.reward.by_source: has no function for data_source {source!r} of {path}, only for {known}: "
                    "add one, or give roles.reward.function for all others"
                )
    for source, function in reward.by_source.items():
        yield from _under(f"roles.reward.by_source.{source}", check_files.reward_problems(function))


def _sandbox(config: Config) -> Iterator[str]:
    reward, sandbox = config.roles.reward, config.roles.reward.sandbox
    if sandbox.kind == "local" and sandbox.url is not None:
        yield (
            f"roles.reward.sandbox.url: {sandbox.url} is not used by kind local: set kind to http, or leave the url out"
        )
    if sandbox.kind == "http":
        address = urlsplit(sandbox.url or "")
        if address.scheme not in ("http", "https") or not address.hostname:
            yield (
                f"roles.reward.sandbox.url: {sandbox.url or 'missing'}: kind http needs the address of a SandboxFusion "
                "server's run_code, as http://host:8080/run_code"
            )
    functions = [*([reward.function] if reward.function else []), *reward.by_source.values()]
    if not any(check_files.reward_takes(function, "sandbox") for function in functions):
        return
    if sandbox.timeout_s >= reward.timeout_s:
        yield (
            f"roles.reward.sandbox.timeout_s: {sandbox.timeout_s:g} s for one program is not less than the "
            f"{reward.timeout_s:g} s of roles.reward.timeout_s for all programs of a response: lower it, or raise that"
        )
    if sandbox.kind == "local" and shutil.which("bwrap") is None:
        yield _Warning(
            "roles.reward.sandbox.kind: local needs bubblewrap, and this machine has no bwrap: install it where the "
            "run starts and scores, or set kind to http and url to a SandboxFusion server"
        )


def _reward_time(config: Config) -> Iterator[str]:
    """Scoring is one remote call: it must end in time even if every response took as long as it may."""
    reward, rollout, data = config.roles.reward, config.roles.rollout, config.data
    prompts = sum(check_files.rows_in(Path(path)) for path in data.validation)
    prompts = min(prompts, data.validation_prompts or prompts)
    responses = max(data.prompts_per_step * rollout.samples_per_prompt, prompts * rollout.validation_samples)
    longest_s = responses * reward.timeout_s / reward.processes
    if longest_s > config.run.timeout_s:
        yield _Warning(
            f"roles.reward.timeout_s: {reward.timeout_s:g} s for each of {responses} responses in {reward.processes} "
            f"processes is up to {longest_s:g} s, longer than the {config.run.timeout_s:g} s of run.timeout_s, which "
            "would end the run: lower it, raise processes or run.timeout_s"
        )


def _sampling(config: Config) -> Iterator[str]:
    rollout = config.roles.rollout
    for key, value, cuts, off in (
        ("top_p", rollout.top_p, rollout.top_p < 1, 1),
        ("top_k", rollout.top_k, rollout.top_k > 0, -1),
    ):
        if cuts:
            yield _Warning(
                f"roles.rollout.{key}: {value} samples from a truncated distribution, while log-probabilities, ratios "
                f"and KL are of the full one, so that training is biased: set {off}"
            )


def _ppo(config: Config) -> Iterator[str]:
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
    if ppo.kl.in_use and config.roles.reference is None:
        term = "ppo.kl.in_reward" if ppo.kl.in_reward else "ppo.kl.loss_coef"
        yield f"roles.reference: missing, but {term} needs it: add it, or switch off in_reward and loss_coef in ppo.kl"
    if config.roles.reference is not None and not ppo.kl.in_use:
        yield _Warning("roles.reference: no KL term uses it: leave it out, or set ppo.kl.in_reward or loss_coef")
    if ppo.kl.target is not None and not ppo.kl.in_reward:
        yield _Warning("ppo.kl.target: has no effect without ppo.kl.in_reward: leave it out, or set in_reward")
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
        yield f"roles.critic: ppo.estimator {ppo.estimator} needs no values: leave it out, or set gae"
    if not ppo.needs_critic and ppo.critic_warmup:
        yield f"ppo.critic_warmup: {ppo.critic_warmup} steps without a critic to train: set 0"
    if ppo.compares_responses and rollout.samples_per_prompt < 2:
        yield (
            f"ppo.estimator: {ppo.estimator} compares the responses to a prompt, and "
            f"roles.rollout.samples_per_prompt is {rollout.samples_per_prompt}: give at least 2"
        )
    if ppo.critic_warmup >= config.run.steps:
        yield _Warning(
            f"ppo.critic_warmup: {ppo.critic_warmup} steps are all of run.steps, so that the actor never trains: "
            "lower it"
        )


def _on_files(lines: Iterator[str]) -> Iterator[str]:
    return (line if isinstance(line, _Warning) else _File(line) for line in lines)


def _under(prefix: str, lines: Iterator[str] | Sequence[str], joint: str = ": ") -> Iterator[str]:
    return (f"{prefix}{joint}{line}" for line in lines)


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
