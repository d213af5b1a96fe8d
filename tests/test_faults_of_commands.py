"""What goes wrong while a command runs, or before: it is named, and nothing of the command outlives it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from installed import GPU, install
from small_run import Command, log_steps, make_run_folder
from test_faults import SMALLER

from megappo.stop_request import STOPPED

pytestmark = pytest.mark.runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run_folder(tmp_path_factory.mktemp("bad"))


def test_a_reward_that_cannot_be_imported_ends_the_command(folder: Path) -> None:
    (folder / "broken.py").write_text("raise LookupError('no table of answers')\ndef compute_score(**_): return 0\n")
    command = Command(folder, *SMALLER, "roles.reward.function=broken.py:compute_score")
    assert command.wait(60) in (1, 2)
    command.assert_nothing_left()
    assert "error: " in command.text and "no table of answers" in command.text
    assert "starting" not in command.text  # it is known before any worker is


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing(folder: Path, number: signal.Signals) -> None:
    command = Command(folder, *SMALLER)
    command.until(lambda: "loading models" in command.text)
    os.kill(command.process.pid, number)
    assert command.wait(20) == 130
    assert "the same command goes on from the last checkpoint" in command.text
    command.assert_nothing_left()
    assert "Traceback" not in command.text


def spoil_parquet(folder: Path) -> None:
    path = folder / "data" / "train.parquet"
    path.write_bytes(path.read_bytes()[:-100])


def spoil_tokenizer(folder: Path) -> None:
    for path in (folder / "model").glob("*token*"):
        path.unlink()


def spoil_weights(folder: Path) -> None:
    path = folder / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (spoil_parquet, "data/train.parquet"),
        (spoil_tokenizer, "tokenizer"),
        (spoil_weights, "model.safetensors"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(folder: Path, tmp_path: Path, spoil: Any, words: str) -> None:
    shutil.copytree(folder, tmp_path / "work")
    spoil(tmp_path / "work")
    command = Command(tmp_path / "work")
    assert command.wait(20) == 2
    errors = [line for line in command.text.splitlines() if not line.startswith("warning: ")]
    assert len(errors) == 1 and errors[0].startswith("error: ") and words in errors[0]
    with contextlib.suppress(psutil.Error):
        assert command.processes() == []


def test_gpus_that_are_not_there_are_missed_at_once(folder: Path, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    command = Command(folder, *SMALLER, "run.device=cuda", "run.dir=elsewhere")
    assert command.wait(20) == 1
    assert "error: vllm: not installed" in command.text and "set run.device=cpu" in command.text
    install(tmp_path, GPU)
    command = Command(folder, *SMALLER, "run.device=cuda", "run.dir=elsewhere", installed=tmp_path)
    assert command.wait(150) == 1
    assert "this machine has 0 GPUs" in command.text and "run.device=cpu" in command.text
    assert "Traceback" not in command.text
    command.assert_nothing_left()


def test_a_signal_before_a_time_limit_makes_a_checkpoint(folder: Path) -> None:
    command = Command(folder, *SMALLER, "run.dir=limited", "run.steps=200")
    command.until(lambda: log_steps(folder / "limited"))
    os.kill(command.process.pid, signal.SIGUSR1)
    assert command.wait(60) == STOPPED
    command.assert_nothing_left()
    last = log_steps(folder / "limited")[-1]
    assert last < 200
    assert f"stopped after step {last} as SIGUSR1 asked" in command.text
    assert (
        json.loads((folder / "limited" / "checkpoints" / f"step_{last}" / "trainer.json").read_text())["step"] == last
    )
