"""Prompt files and lengths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from megappo.check.findings import Advice
from megappo.check.model_files import has_chat_template
from megappo.config import Config
from megappo.data.prompt_files import read_prompt_file
from megappo.models.spec import ModelError, ModelSpec


def data_findings(config: Config) -> Iterator[str]:
    """Prompt files and how many prompts are asked of them."""
    data = config.data
    if not data.train:
        yield "data.train: empty: give at least one parquet file"
    rows = {"train": 0, "validation": 0, "canary": 0}
    chat = []
    for split, paths in (("train", data.train), ("validation", data.validation), ("canary", data.canary)):
        for path in paths:
            try:
                file = read_prompt_file(Path(path))
            except ValueError as error:
                yield f"data.{split}: {error}"
                continue
            rows[split] += file.rows
            chat += [(split, path)] * file.chat
    folder = Path(config.model_folder("actor"))
    if chat and folder.is_dir() and not has_chat_template(folder):
        split, path = chat[0]
        yield (
            f"data.{split}: {path}: its prompts are chat messages, and {folder} has no chat template: "
            "add chat_template.jinja there, or write prompts as strings"
        )
    if 0 < rows["train"] < data.prompts_per_step:
        yield Advice(
            f"data.prompts_per_step: {data.prompts_per_step} is more than the {rows['train']} prompts of data.train: "
            "every step repeats prompts"
        )
    if data.validation and 0 < rows["validation"] < data.validation_prompts:
        yield Advice(
            f"data.validation_prompts: {data.validation_prompts} is more than the {rows['validation']} prompts of "
            "data.validation: all are used"
        )


def replay_findings(config: Config) -> Iterator[str]:
    """Batches that are trained on instead of generated ones: every row of every file."""
    replay = config.data.replay
    if replay:  # since arrays, which reading takes, are slow to import
        from megappo.data.given import limits_of
        from megappo.data.prompts import DataError
        from megappo.data.replay import load_replay

        try:
            limits = limits_of(config)
        except ModelError:  # which is said of the models
            limits = None
        for path in replay:
            try:
                columns = load_replay(path, limits).column_names
            except DataError as error:
                yield f"data.replay: {error}"
                continue
            if missing := [name for name in config.ppo.greedy_columns if name not in columns]:
                yield (
                    f"data.replay: {path}: has no column {', '.join(missing)}, of greedy responses, which "
                    f"ppo.estimator {config.ppo.estimator} takes: give batches that such a run dumped, or choose "
                    "another estimator"
                )
    if replay and len(replay) < config.run.steps:
        yield (
            f"data.replay: {len(replay)} file{'s' if len(replay) > 1 else ''} for the {config.run.steps} steps of "
            "run.steps: give a file for each step, or fewer steps"
        )


def length_findings(config: Config, specs: Mapping[str, ModelSpec]) -> Iterator[str]:
    """Lengths against the model and against the token budgets."""
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
