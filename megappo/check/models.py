"""Model folders: families, weights, tokenizers, vocabularies, end-of-text tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from megappo.check.findings import Absent, Advice, on_files, under
from megappo.check.model_files import tokenizer_problems, weight_problems
from megappo.config import Config
from megappo.formats.safetensors_files import set_aside
from megappo.models.end_of_text import NAMED_IN, end_of_text_ids
from megappo.models.spec import ModelError, ModelSpec, read_model_spec


def model_findings(config: Config, specs: dict[str, ModelSpec]) -> Iterator[str]:
    """Check every model folder once, and put the readable ones into ``specs``."""
    refused: set[str] = set()
    looked_at: set[tuple[str, bool]] = set()
    for name, role in config.roles.megatron.items():
        if name == "reward" and role.model is None:  # which is said of the rewards
            continue
        folder = config.model_folder(name)
        label = f"roles.{name}.model" if role.model else "model"
        kind = folder, name == "reward"  # whose head, unlike a critic's, has to be there
        if kind not in looked_at and folder not in refused:
            looked_at.add(kind)
            try:
                specs[folder] = read_model_spec(folder)
            except ModelError as error:
                refused.add(folder)
                problems = under(label, error.problems)
                yield from problems if Path(folder).exists() else map(Absent, problems)
                continue
            if specs[folder].num_experts:
                yield (
                    f"{label}: {folder} is a mixture of experts ({specs[folder].family}), which can be planned and "
                    "converted but not yet trained: give a dense model"
                )
            shapes = specs[folder].hf_shapes(scalar_head=name == "reward")
            if name == "critic":
                shapes.pop("lm_head.weight", None)  # a value head takes its place
            yield from on_files(under(label, weight_problems(Path(folder), shapes)))
            yield from map(Advice, under(label, set_aside(folder)))
            if name in ("actor", "reward"):
                yield from on_files(under(label, tokenizer_problems(Path(folder))))
    actor = specs.get(config.model_folder("actor"))
    for name, role in config.roles.megatron.items():
        spec = specs.get(config.model_folder(name))
        if actor is None or spec is None or spec.vocab_size == actor.vocab_size or name == "reward":
            continue  # a reward model reads text
        if name == "reference" or spec.vocab_size < actor.vocab_size:
            yield (
                f"roles.{name}.model: {role.model} has a vocabulary of {spec.vocab_size} tokens, the actor's has "
                f"{actor.vocab_size}: give a model with the actor's tokenizer"
            )


def end_of_text_findings(config: Config, specs: Mapping[str, ModelSpec]) -> Iterator[str]:
    """Whether responses of the actor can end."""
    folder = config.model_folder("actor")
    if folder not in specs:  # which is an error already
        return
    size = specs[folder].vocab_size
    if unknown := [str(token) for token in config.roles.rollout.stop_token_ids if token >= size]:
        yield (
            f"roles.rollout.stop_token_ids: {', '.join(unknown)}: the actor's model has tokens 0 to {size - 1} only: "
            "leave it out"
        )
    label = "roles.actor.model" if config.roles.actor.model else "model"
    try:
        if not end_of_text_ids(folder):
            yield (
                f"{label}: {folder}: has no end-of-text token, so that responses would never stop: give eos_token_id "
                f"in {' or '.join(NAMED_IN)}, or eos_token in tokenizer_config.json"
            )
    except ValueError as error:
        yield f"{label}: {error}"
