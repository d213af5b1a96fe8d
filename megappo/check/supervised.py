"""What can be known of ``megappo reward-train`` and ``megappo sft`` before they start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from megappo.check.findings import Advice, done, shown, under
from megappo.check.lora import lora_findings
from megappo.check.megatron import eight_bit_findings, size_findings
from megappo.check.memory import training_fit_findings
from megappo.check.model_files import has_chat_template, tokenizer_problems, weight_problems
from megappo.check.run_folder import checkpoint_steps, differences, is_unvalidated, place_findings
from megappo.check.unused import unused_findings
from megappo.config import ConfigError, SupervisedConfig, Task, load_supervised
from megappo.data.prompt_files import PromptFile, read_columns
from megappo.formats.safetensors_files import set_aside
from megappo.models.spec import ModelError, ModelSpec, read_model_spec

COLUMNS: dict[Task, tuple[str, ...]] = {
    "reward-train": ("prompt", "chosen", "rejected"),
    "sft": ("prompt", "response"),
}
FIXED_ON_RESUME = ("run.seed", "model", "data.train", "data.batch", "data.max_tokens", "data.shuffle", "role.lora")


def check_supervised_file(
    path: str | Path, overrides: Sequence[str], task: Task
) -> tuple[SupervisedConfig | None, tuple[str, ...], tuple[str, ...]]:
    """Load and check a configuration file.

    Returns:
        The configuration (None if it has errors that keep it from being read), errors and warnings.
    """
    try:
        config = load_supervised(path, overrides)
    except ConfigError as error:
        found = error.news(supervised_findings(error.partial, task)) if error.partial else ()
        errors = tuple(line for line in found if not isinstance(line, Advice))
        return None, (*error.problems, *errors), tuple(line for line in found if isinstance(line, Advice))
    findings = list(supervised_findings(config, task))
    if all(isinstance(line, Advice) for line in findings):
        findings += training_fit_findings(config, "reward" if task == "reward-train" else "actor")
    errors = tuple(line for line in findings if not isinstance(line, Advice))
    return config, errors, tuple(line for line in findings if isinstance(line, Advice))


def supervised_findings(config: SupervisedConfig, task: Task) -> Iterator[str]:
    """Every mistake, and advice."""
    spec = None
    try:
        spec = read_model_spec(config.model_folder)
    except ModelError as error:
        yield from under("model", error.problems)
    if spec is not None:
        yield from _model_findings(config, task, spec)
    yield from _pool_findings(config, spec)
    yield from _data_findings(config, task)
    yield from unused_findings(config)
    yield from supervised_folder_findings(config)


def _model_findings(config: SupervisedConfig, task: Task, spec: ModelSpec) -> Iterator[str]:
    folder = Path(config.model_folder)
    if spec.num_experts:
        yield (
            f"model: {folder} is a mixture of experts ({spec.family}), which can be planned and converted but not yet "
            "trained: give a dense model"
        )
    shapes = spec.hf_shapes()
    if task == "reward-train":
        shapes.pop("lm_head.weight", None)  # a scalar head takes its place
    yield from under("model", weight_problems(folder, shapes))
    yield from map(Advice, under("model", set_aside(folder)))
    yield from under("model", tokenizer_problems(folder))
    needed = config.data.max_tokens * (2 if task == "reward-train" else 1)
    if config.role.micro_batch_tokens < needed:
        what = "a pair of two sequences" if task == "reward-train" else "a sequence"
        yield (
            f"role.micro_batch_tokens: {config.role.micro_batch_tokens} does not hold {what} of data.max_tokens "
            f"{config.data.max_tokens}: give at least {needed}"
        )
    if config.data.max_tokens > spec.max_positions:
        yield (
            f"data.max_tokens: {config.data.max_tokens} is more than the {spec.max_positions} positions of {folder}: "
            f"give at most {spec.max_positions}"
        )


def _pool_findings(config: SupervisedConfig, spec: ModelSpec | None) -> Iterator[str]:
    role, pool = config.role, config.pools.get(config.role.pool)
    yield from size_findings("role", role, spec, pool)
    yield from eight_bit_findings("role", role, spec, config.run)
    yield from lora_findings("role", role, spec, trains=True)
    if role.offload != "none":
        yield Advice(
            f"role.offload: {role.offload} costs time and makes room for nobody, as no other role is there: set none"
        )
    if pool is None:
        yield f"role.pool: {role.pool!r} is not a pool: pools are {', '.join(config.pools) or 'none'}"
        return
    for name in config.pools:
        if name != role.pool:
            yield f"pools.{name}: is not the pool of the one role, {role.pool}: leave it out"
    if config.data.batch < (ranks := pool.devices // (role.tp * role.pp)):
        yield Advice(
            f"data.batch: {config.data.batch} leaves some of {ranks} data-parallel ranks without work: raise it, or tp "
            "or pp"
        )


def _data_findings(config: SupervisedConfig, task: Task) -> Iterator[str]:
    if not config.data.train:
        yield "data.train: empty: give at least one parquet file"
    folder = Path(config.model_folder)
    for split, paths in (("train", config.data.train), ("validation", config.data.validation)):
        for path in paths:
            try:
                file = read_columns(Path(path), COLUMNS[task])
            except ValueError as error:
                yield f"data.{split}: {error}"
                continue
            yield from under(f"data.{split}: {path}", _kind_problems(file, task))
            if file.chat and folder.is_dir() and not has_chat_template(folder):
                yield (
                    f"data.{split}: {path}: its prompts are chat messages, and {folder} has no chat template: add "
                    "chat_template.jinja there, or write prompts as strings"
                )


def _kind_problems(file: PromptFile, task: Task) -> Iterator[str]:
    """Columns of which every row would be refused."""
    from megappo.data.given import family  # arrays are slow to import

    wanted: dict[str, tuple[str, ...]] = dict.fromkeys(COLUMNS[task], ("strings",))
    if file.chat:
        del wanted["prompt"]
    if task == "reward-train" and "margin" in file.schema.names:
        wanted["margin"] = ("numbers", "whole numbers", "null")
    for name, kinds in wanted.items():
        if (found := family(file.schema.field(name).type)) not in kinds:
            also = ", or chat messages" if name == "prompt" else ""
            yield f"{name} holds {found}: it must hold {kinds[0]}{also}: write it again"


def supervised_folder_findings(config: SupervisedConfig) -> Iterator[str]:
    """The run folder, its trackers, and a run that it may hold."""
    run, folder = config.run, config.run.folder
    yield from place_findings(run)
    if run.keep_best is not None:
        yield "run.keep_best: is for PPO only: leave it out, and keep as many of run.keep_checkpoints as you need"
    steps = checkpoint_steps(folder)
    if not steps:
        return
    try:
        stored = load_supervised(folder / "config.yaml")
    except ConfigError as error:
        yield f"run.dir: {folder} holds checkpoints of another kind of run ({error.problems[0]}): choose another"
        return
    for dotted, old, new in differences(stored, config, FIXED_ON_RESUME):
        yield (
            f"{dotted}: {shown(new)} differs from {shown(old)}, with which the run in {folder} began: set it back, or "
            "choose another run.dir"
        )
    if steps[-1] >= run.steps and not is_unvalidated(folder, steps[-1]):
        yield Advice(f"run.steps: {done(run.steps)} in {folder}: raise run.steps, or choose another run.dir")
