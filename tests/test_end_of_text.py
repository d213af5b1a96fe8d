"""The tokens that end a response, in the spellings that model folders have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megappo.models.end_of_text import end_of_text_ids


def write(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_all_files_count(tmp_path: Path) -> None:
    write(tmp_path, generation_config={"eos_token_id": [9, 5]}, config={"eos_token_id": 7})
    write(tmp_path, tokenizer_config={"eos_token": "<end>", "added_tokens_decoder": {"3": {"content": "<end>"}}})
    assert end_of_text_ids(tmp_path) == [3, 5, 7, 9]


def test_none(tmp_path: Path) -> None:
    assert end_of_text_ids(tmp_path) == []
    write(tmp_path, config={"eos_token_id": None}, tokenizer_config={"eos_token": None}, tokenizer={})
    assert end_of_text_ids(tmp_path) == []
    write(tmp_path, tokenizer_config={"eos_token": "<end>"}, vocab={"a": 0})
    assert end_of_text_ids(tmp_path) == [], "a token that no file numbers"


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer": {"added_tokens": [{"id": 0, "content": "<pad>"}, {"id": 4, "content": "<end>"}]}},
        {"tokenizer": {"added_tokens": [], "model": {"vocab": {"a": 0, "<end>": 4}}}},
        {"tokenizer": {"model": {"vocab": [["a", -1.0], ["b", -1.0], ["c", -1.0], ["d", -1.0], ["<end>", 0.0]]}}},
        {"added_tokens": {"<end>": 4}},
        {"vocab": {"<end>": 4}},
    ],
)
@pytest.mark.parametrize("eos_token", ["<end>", {"content": "<end>", "lstrip": False}])
def test_tokenizers_end(tmp_path: Path, files: dict[str, Any], eos_token: Any) -> None:
    write(tmp_path, tokenizer_config={"eos_token": eos_token}, **files)
    assert end_of_text_ids(tmp_path) == [4]


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config.json: holds no JSON object: write or download it again"):
        end_of_text_ids(tmp_path)


def test_agrees_with_the_tokenizer_itself(tmp_path: Path) -> None:
    from small_run import make_tiny_model

    tokenizer = make_tiny_model().make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    assert end_of_text_ids(tmp_path) == [tokenizer.eos_token_id]
