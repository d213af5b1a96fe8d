"""Options of commands that would have no effect: each is refused by name, with its value and the fix, at once."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from published_files import gsm8k_rows, write_lines
from small_project import Project, make_project

from megappo.cli import main
from megappo.config import load_config
from megappo.score import DataError, Options, score


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.chdir(tmp_path)
    return make_project(tmp_path)


BENCH = {
    "convert --no-optimizer": "--no-optimizer: is for bench training, and convert updates as it does: leave it out",
    "planning --models here": "--models here: bench planning makes no model: leave it out",
    "reshard --models here": "--models here: bench reshard makes no model: leave it out",
    "convert --out none/a.json": "--out none/a.json: is no JSON file to add a table to (",
    "convert --out config.yaml": "--out config.yaml: is no JSON file to add a table to (",
    "convert --out list.json": "--out list.json: is no JSON file to add a table to (no object): name another",
}


@pytest.mark.parametrize("line", BENCH)
def test_bench(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    def run(*_: object, **__: object) -> None:
        raise AssertionError("measures")

    for name in ("convert", "planning", "reshard"):
        monkeypatch.setitem(sys.modules, f"megappo.bench.{name}", SimpleNamespace(run=run, SIZES=("tiny",)))
    (project.folder / "list.json").write_text("[]")
    assert main(["bench", *line.split()]) in (1, 2)
    assert capsys.readouterr().err.startswith(f"error: {BENCH[line]}")


def test_a_table_is_added_to_a_file_that_is_there_or_not(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    run = SimpleNamespace(run=lambda *given, **more: seen.append((*given, more)), SIZES=("tiny",))
    monkeypatch.setitem(sys.modules, "megappo.bench.training", run)
    (project.folder / "there.json").write_text('{"a": []}')
    for out in ("there.json", "new.json"):
        assert main(["bench", "training", "--no-optimizer", "--out", out]) == 0
    assert seen == [("tiny", "runs/bench", out, {"optimizer": False}) for out in ("there.json", "new.json")]
    assert (project.folder / "there.json").read_text() == '{"a": []}' and not (project.folder / "new.json").exists()


def test_a_profile_is_of_this_machine_alone(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "config.yaml", "--measure-device", "here.yaml"]) == 2
    assert capsys.readouterr().err == "error: --measure-device: takes no CONFIG (config.yaml): leave one out\n"
    assert not (project.folder / "here.yaml").exists()


@pytest.mark.parametrize("option", ["--chat", "--operations +"])
def test_word_problems_are_as_they_are(project: Project, capsys: pytest.CaptureFixture[str], option: str) -> None:
    assert main(["data", "arithmetic", "out", "--word-problems", *option.split()]) == 2
    said = f"error: {option}: word problems are chat messages with operations of their own: leave it out\n"
    assert capsys.readouterr().err == said
    assert not (project.folder / "out").exists()


def test_a_seed_of_no_draw(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    (source := project.folder / "gsm8k").mkdir()
    for split in ("train", "test"):
        write_lines(source / f"{split}.jsonl", gsm8k_rows(20))
    assert main(["data", "gsm8k", "gsm8k", "out", "--seed", "0"]) == 2
    said = "--seed 0: nothing is drawn, as there is a test split: leave it out, or give --validation"
    assert capsys.readouterr().err == f"error: {said}\n"
    assert main(["data", "gsm8k", "gsm8k", "out", "--seed", "0", "--validation", "2"]) == 0


def test_resources_of_devices_that_are_not_asked_for(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["launch", "kuberay", "config.yaml", "--image=i", "--claim=c", "--mount=/m", "--resource=rdma/hca=2"]
    assert main([*command, "run.device=cpu"]) == 2
    said = "--resource rdma/hca=2: is for pods with devices, and run.device is cpu: leave it out"
    assert f"error: {said}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Options(against="model/../train.parquet"), "--against model/../train.parquet: is DATA itself: give"),
        (Options(against_column="response"), "--against-column response: is the column that is scored: name another"),
        (Options("chosen", "train.parquet", "chosen"), "--against train.parquet: is DATA itself: give"),
    ],
)
def test_responses_against_themselves(project: Project, options: Options, words: str) -> None:
    with pytest.raises(DataError) as caught:
        score(load_config("config.yaml"), "train.parquet", "out.parquet", options, print)
    assert str(caught.value).startswith(words)
