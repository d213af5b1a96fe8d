"""What a Hugging Face folder has beside its weights: copied as it is, but for what the weights make untrue."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from megappo.formats.dtypes import Dtype
from megappo.models.families import known_families
from megappo.models.spec import ModelError

NAMES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "*vocab*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template*",
    "additional_chat_templates",
    "spiece.model",
    "*.tiktoken",
)


def companion_files(folder: Path) -> list[Path]:
    """Config, generation config, tokenizer and chat template, as far as they are there, also in folders of theirs."""
    tops = {path for name in NAMES for path in folder.glob(name)}
    return sorted({path for top in tops for path in (top, *top.rglob("*")) if not path.is_dir()})


def copy_companions(source: Path, destination: Path) -> None:
    """Copy them into a folder, made if need be.

    Raises:
        ModelError: one cannot be read.
    """
    destination.mkdir(parents=True, exist_ok=True)
    for path in companion_files(source):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ModelError([f"{path}: cannot be read ({error}): copy it again"]) from None
        target = destination / path.relative_to(source)
        target.parent.mkdir(exist_ok=True, parents=True)
        target.write_bytes(content)


Head = Literal["language-model", "value", "score"]
"""What weights end in: logits, a number a token (critic), or a number a sequence (reward model)."""

ENDINGS: Mapping[Head, str] = {
    "language-model": "ForCausalLM",
    "value": "ForTokenClassification",
    "score": "ForSequenceClassification",
}


def says_scalar_head(folder: Path) -> bool:
    """Whether ``config.json`` says that the weights end in a scalar head."""
    return said_head(folder) not in (None, "language-model")


def said_head(folder: Path) -> Head | None:
    """Which head ``config.json`` says, if it does."""
    named = json.loads((folder / "config.json").read_text()).get("architectures")
    architectures = [str(name) for name in named] if isinstance(named, list) else [str(named)]
    return next((head for head, end in ENDINGS.items() if any(name.endswith(end) for name in architectures)), None)


def fit_config(folder: Path, dtype: Dtype, *, head: Head) -> None:
    """Have ``config.json`` say which dtype and which head the weights have; where it does, it stays as it is."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    changes: dict[str, Any] = {key: dtype.name for key in ("dtype", "torch_dtype") if key in config}
    if head != (said_head(folder) or "language-model"):
        architecture = known_families()[config["model_type"]].architecture
        changes["architectures"] = [architecture.replace("ForCausalLM", ENDINGS[head])]
        if head != "language-model":
            changes |= {"id2label": {"0": head}, "label2id": {head: 0}}
    if any(config.get(key) != value for key, value in changes.items()):
        path.write_text(json.dumps({**config, **changes}, indent=2) + "\n")
