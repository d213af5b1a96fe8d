"""Options of a conversion: each means something, or is refused by name before anything is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_convert import assert_same_weights, make, problems, run

from megappo.models.lora import FILE
from megappo.models.spec import ModelError


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shard_gb": 2.0}, "--shard-gb 2.0: is the limit of a Hugging Face folder's files"),
        ({"shard_gb": 4.0}, "--shard-gb 4.0: is the limit of a Hugging Face folder's files"),  # the default, but given
        ({"role": "actor"}, "--role actor: "),
        ({"model": "x"}, "--model x: "),
        ({"bucket_mb": 4096}, "--bucket-mb 4096: a chunk of a checkpoint has at most 2048: lower it"),
        ({"processes": 0}, "--processes 0: must be positive"),
    ],
    ids=str,
)
def test_what_means_nothing_for_a_checkpoint(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    said = problems(make(tmp_path / "model"), tmp_path / "checkpoint", **options)
    assert said.startswith(words) and said.endswith(("leave it out", "lower it", "positive"))


def test_what_means_nothing_for_a_folder(tmp_path: Path) -> None:
    """All at once, by name and value; of a PEFT folder and of merged weights others than of plain ones."""
    run(make(tmp_path / "model"), checkpoint := tmp_path / "checkpoint")
    said = problems(checkpoint, tmp_path / "out", tp=1, ep=2, bucket_mb=8).splitlines()
    folder = "DST will be a Hugging Face folder of the weights as they are: leave it out"
    layout = "is the layout of a checkpoint's files"
    assert said == [
        f"--tp 1: {layout}, and {folder}",
        f"--ep 2: {layout}, and {folder}",
        f"--bucket-mb 8: is the limit of a checkpoint's chunks, and of what is merged at a time, and {folder}",
    ]
    (checkpoint / FILE).write_text("{}")
    every = {"tp": 2, "shard_gb": 1.0, "bucket_mb": 8, "verify": True}
    for to, names in (
        ("peft", ["--tp 2", "--shard-gb 1.0", "--bucket-mb 8", "--verify"]),
        ("hf", ["--tp 2", "--verify"]),
    ):
        assert [
            line.split(":")[0] for line in problems(checkpoint, tmp_path / "out", to=to, **every).splitlines()
        ] == names


def scalar(folder: Path) -> Path:
    """A model folder whose head gives one number a token; its config does not say so."""
    tensors = load_file(make(folder) / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(
        {**tensors, "score.weight": torch.randn(1, 64).bfloat16()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


def architecture(folder: Path) -> str:
    return str(json.loads((folder / "config.json").read_text())["architectures"][0])


def test_a_role_says_what_a_single_checkpoint_is(tmp_path: Path) -> None:
    """Copied out of its run, a reward model's checkpoint looks as a critic's does."""
    run(scalar(tmp_path / "model"), checkpoint := tmp_path / "copied")
    for role, kind in ((None, "Token"), ("critic", "Token"), ("reward", "Sequence")):
        run(checkpoint, tmp_path / f"{role}", role=role)
        assert architecture(tmp_path / f"{role}") == f"Qwen2For{kind}Classification"
        assert_same_weights(tmp_path / "model", tmp_path / f"{role}")
    with pytest.raises(ModelError, match="made from something else"):
        run(checkpoint, tmp_path / "critic", role="reward")
    said = problems(checkpoint, tmp_path / "out", role="actor")
    assert said == f"--role actor: {checkpoint} ends in a scalar head: leave it out"
    run(make(tmp_path / "other"), tmp_path / "language")
    said = problems(tmp_path / "language", tmp_path / "out", role="reward")
    assert said == f"--role reward: {tmp_path}/language ends in a language-model head: leave it out"


def test_a_role_that_a_checkpoint_is_not(tmp_path: Path) -> None:
    run(scalar(tmp_path / "model"), tmp_path / "step_4" / "critic")
    shutil.copytree(tmp_path / "step_4" / "critic", tmp_path / "step_4" / "reward")
    said = problems(tmp_path / "step_4" / "critic", tmp_path / "out", role="reward")
    fix = f"leave it out, or give {tmp_path}/step_4"
    assert said == f"--role reward: {tmp_path}/step_4/critic has the weights of the critic: {fix}"
    run(tmp_path / "step_4", tmp_path / "reward", role="reward")
    assert architecture(tmp_path / "reward") == "Qwen2ForSequenceClassification"
    run(tmp_path / "reward", tmp_path / "again")
    run(tmp_path / "again", tmp_path / "unsaid")
    assert architecture(tmp_path / "unsaid") == "Qwen2ForSequenceClassification"  # as its config says
    run(tmp_path / "again", tmp_path / "critic", role="critic")
    assert architecture(tmp_path / "critic") == "Qwen2ForTokenClassification"
