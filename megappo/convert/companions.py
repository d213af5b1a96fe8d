"""What a Hugging Face folder has beside its weights: copied as it is, but for what the weights make untrue."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from megappo.models.families import known_families

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
    """Config, generation config, tokenizer and chat template, as far as they are there."""
    return sorted({path for name in NAMES for path in folder.glob(name)})


def copy_companions(source: Path, destination: Path) -> None:
    """Copy them into a folder, made if need be."""
    destination.mkdir(parents=True, exist_ok=True)
    for path in companion_files(source):
        if path.is_dir():
            shutil.copytree(path, destination / path.name)
        else:
            shutil.copyfile(path, destination / path.name)


def says_scalar_head(folder: Path) -> bool:
    """Whether ``config.json`` says that the weights end in a scalar head."""
    architectures = json.loads((folder / "config.json").read_text()).get("architectures") or []
    return any(name.endswith(("ForTokenClassification", "ForSequenceClassification")) for name in architectures)


def fit_config(folder: Path, dtype: torch.dtype, *, scalar_head: bool) -> None:
    """Have ``config.json`` say which dtype and which head the weights have; where it does, it stays as it is."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    changes: dict[str, Any] = {key: _name(dtype) for key in ("dtype", "torch_dtype") if key in config}
    if scalar_head != says_scalar_head(folder):
        architecture = known_families()[config["model_type"]].architecture
        if scalar_head:
            architecture = architecture.replace("ForCausalLM", "ForTokenClassification")
            changes |= {"id2label": {"0": "value"}, "label2id": {"value": 0}}
        changes["architectures"] = [architecture]
    if any(config.get(key) != value for key, value in changes.items()):
        path.write_text(json.dumps({**config, **changes}, indent=2) + "\n")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
