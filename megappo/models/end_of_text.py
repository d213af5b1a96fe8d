"""Which tokens end a response, from the files of a Hugging Face model folder. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

NAMED_IN = ("generation_config.json", "config.json")


def end_of_text_ids(folder: str | Path) -> list[int]:
    """Token ids that end a response, ascending: all that the generation config, the config and the tokenizer name.

    The union, since chat models often name the end of a turn in one of these files and the end of a text in another.

    Raises:
        ValueError: one of the files is no JSON object.
    """
    folder = Path(folder)
    found: set[int] = set()
    for name in NAMED_IN:
        value = _read(folder / name).get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    settings = _read(folder / "tokenizer_config.json")
    token = settings.get("eos_token")
    content = token.get("content") if isinstance(token, Mapping) else token
    if content is not None:
        number = next((id for text, id in _vocabulary(folder, settings) if text == content), None)
        found.update([] if number is None else [number])
    return sorted(found)


def _vocabulary(folder: Path, settings: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """(token, id): added tokens before the ordinary ones, small files before the large one."""
    for number, token in (settings.get("added_tokens_decoder") or {}).items():
        yield token["content"], int(number)
    yield from _read(folder / "added_tokens.json").items()
    tokenizer = _read(folder / "tokenizer.json")
    for token in tokenizer.get("added_tokens") or ():
        yield token["content"], token["id"]
    ordinary = (tokenizer.get("model") or {}).get("vocab") or _read(folder / "vocab.json")
    if isinstance(ordinary, Mapping):
        yield from ordinary.items()
    else:  # unigram: [token, score] in the order of ids
        yield from ((token, number) for number, (token, _) in enumerate(ordinary))


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds no JSON object: write or download it again")
    return value
