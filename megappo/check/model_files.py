"""Model folders, looked at from outside: file names and headers only, so that large ones are quick."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

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
        files = _weight_files(folder)
        tensors: dict[str, tuple[int, ...]] = {}
        for path in files:
            tensors.update(_safetensors_shapes(path))
    except ValueError as error:
        yield str(error)
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


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ValueError(
            f"{folder}: has no weights: add model.safetensors, or model.safetensors.index.json and its shards"
        )
    try:
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(f"{index}: is no index of safetensors shards: write or download it again") from None
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise ValueError(f"{folder}: lacks {len(missing)} of {len(shards)} weight shards, {_first(missing)}: add them")
    return [folder / shard for shard in shards]


def _safetensors_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes from a header: 8 bytes of length, JSON, then exactly the bytes that the JSON accounts for."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            if 8 + length > size:
                raise ValueError
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        if size != 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0):
            raise ValueError
        return {name: tuple(entry["shape"]) for name, entry in header.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(f"{path}: is truncated or no safetensors file: write or download it again") from None


def _first(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
