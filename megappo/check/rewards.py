"""Rewards: functions, sandbox, time."""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from urllib.parse import urlsplit

from megappo.check.findings import Advice, under
from megappo.check.model_files import has_chat_template
from megappo.check.reward_functions import reward_problems, reward_takes
from megappo.config import Config, MegatronSizes, RewardConfig
from megappo.data.prompt_files import data_sources, read_prompt_file, watched_prompts


def reward_findings(config: Config) -> Iterator[str]:
    """Whether every data source has a reward: a function, a model, or both."""
    reward = config.roles.reward
    if not reward.has_functions and reward.pool is None:
        yield (
            "roles.reward.function: missing: give package.module:name or file.py:name, fill by_source, or give pool "
            "and model for a reward model"
        )
        return
    if reward.function is not None:
        yield from under("roles.reward.function", reward_problems(reward.function))
    for source, function in reward.by_source.items():
        yield from under(f"roles.reward.by_source.{source}", reward_problems(function))
    files = (*config.data.train, *config.data.validation, *config.data.canary)
    sources = {path: data_sources(Path(path)) for path in files}
    for path, present in sources.items():
        for source in sorted(present):
            yield from _source_findings(reward, source, path)
    if files and all(sources.values()):  # else a file is an error already
        yield from _unused_keys(reward, sorted(set().union(*sources.values())))


def _unused_keys(reward: RewardConfig, present: list[str]) -> Iterator[str]:
    """Keys that no row's data source has: spelt otherwise, or for other files."""
    for key in ("by_source", "weights_by_source"):
        for source in sorted(set(getattr(reward, key)) - set(present)):
            close = difflib.get_close_matches(source, present, 1)
            fix = f"did you mean {close[0]}?" if close else f"there are {', '.join(present)}"
            yield Advice(f"roles.reward.{key}.{source}: no row of the data files has this data_source: {fix}")


def _source_findings(reward: RewardConfig, source: str, path: str) -> Iterator[str]:
    weights = reward.weights_of(source)
    if weights.function or weights.model:
        return
    if reward.function is None and source not in reward.by_source and reward.pool is None:
        yield (
            f"roles.reward.by_source: has no function for data_source {source!r} of {path}, only for "
            f"{', '.join(reward.by_source)}: add one, or give roles.reward.function for all others"
        )
    else:
        key = "weights_by_source" if source in reward.weights_by_source else "weights"
        yield (
            f"roles.reward.{key}: leaves nothing to score data_source {source!r} of {path}: give what it has, a "
            "function or a model, a weight that is not 0"
        )


def reward_model_findings(config: Config) -> Iterator[str]:
    """What a reward model needs, and what has no effect without one."""
    reward = config.roles.reward
    if reward.pool is None:
        if reward.model is not None:
            yield f"roles.reward.pool: missing, but roles.reward.model is {reward.model}: give the pool that it runs in"
        sizes = [each.name for each in fields(MegatronSizes) if each.name not in ("pool", "model")]
        for name in (name for name in sizes if getattr(reward, name) != getattr(RewardConfig(), name)):
            yield Advice(
                f"roles.reward.{name}: {getattr(reward, name)} has no effect without roles.reward.pool and model"
            )
        return
    if reward.model is None:
        yield "roles.reward.model: missing: give the folder of a sequence classification model with one label"
        return
    files = (*config.data.train, *config.data.validation, *config.data.canary)
    chat = next((path for path in files if _is_chat(Path(path))), None)
    if chat is not None and Path(reward.model).is_dir() and not has_chat_template(Path(reward.model)):
        yield (
            f"roles.reward.model: {reward.model} has no chat template, and the prompts of {chat} are chat messages: "
            "add chat_template.jinja there, as the model was trained with it"
        )


def _is_chat(path: Path) -> bool:
    try:
        return read_prompt_file(path).chat
    except ValueError:
        return False


def sandbox_findings(config: Config) -> Iterator[str]:
    """Where code that the model wrote is to run."""
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
    if not any(reward_takes(function, "sandbox") for function in functions):
        return
    if sandbox.timeout_s >= reward.timeout_s:
        yield (
            f"roles.reward.sandbox.timeout_s: {sandbox.timeout_s:g} s for one program is not less than the "
            f"{reward.timeout_s:g} s of roles.reward.timeout_s for all programs of a response: lower it, or raise that"
        )
    if sandbox.kind == "local" and shutil.which("bwrap") is None:
        yield Advice(
            "roles.reward.sandbox.kind: local needs bubblewrap, and this machine has no bwrap: install it where the "
            "run starts and scores, or set kind to http and url to a SandboxFusion server"
        )


def reward_time_findings(config: Config) -> Iterator[str]:
    """Scoring is one remote call: it must end in time even if every response took as long as it may."""
    reward, rollout, data = config.roles.reward, config.roles.rollout, config.data
    if not reward.has_functions:
        return
    watched = watched_prompts(data) * rollout.validation_samples
    responses = max(data.prompts_per_step * rollout.samples_per_prompt, watched)
    longest_s = responses * reward.timeout_s / reward.processes
    if longest_s > config.run.timeout_s:
        yield Advice(
            f"roles.reward.timeout_s: {reward.timeout_s:g} s for each of {responses} responses in {reward.processes} "
            f"processes is up to {longest_s:g} s, longer than the {config.run.timeout_s:g} s of run.timeout_s, which "
            "would end the run: lower it, raise processes or run.timeout_s"
        )
