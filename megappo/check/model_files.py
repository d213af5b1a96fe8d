"""Model folders, looked at from outside: file names and headers only, so that large ones are quick."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from megappo.formats.safetensors_files import find_tensors
from megappo.models.spec import ModelError

VOCABULARIES = ("vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")


def tokenizer_problems(folder: Path) -> Iterator[str]:
    """Whether a folder has what a fast or slow tokenizer is made from."""
    if (folder / "tokenizer.json").is_file():
        return
    if not (folder / "tokenizer_config.json").is_file():
        yield f"{folder}: has no tokenizer: add tokenizer.json, or tokenizer_config.json and its vocabulary"
    elif not any((folder / name).is_file() for name in VOCABULARIES):
        yield f"{folder}: its tokenizer has no vocabulary: add tokenizer.json or one of {', '.join(VOCABULARIES)}"


def has_chat_template(folder: Path) -> bool:
    """Whether the folder's tokenizer knows how to write chat messages."""
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False


def weight_problems(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Whether a folder's safetensors files are whole and hold tensors of these names and shapes."""
    try:
        tensors = {name: stored.shape for name, stored in find_tensors(folder).items()}
    except ModelError as error:
        yield from error.problems
        return
    missing = [name for name in shapes if name not in tensors]
    if missing == ["score.weight"]:
        yield (
            f"{folder}: is a language model, not a reward model: give one with a scalar head "
            "(AutoModelForSequenceClassification), or train one: megappo reward-train"
        )
    elif missing:
        yield f"{folder}: its weights lack {_first(missing)}: give the config.json that the weights belong to"
    for name, shape in shapes.items():
        if tensors.get(name, shape) != shape:
            yield (
                f"{folder}: {name} has shape {list(tensors[name])} where config.json asks for {list(shape)}: "
                "give the config.json that the weights belong to"
            )
            return  # one wrong size shows in every layer


def _first(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
