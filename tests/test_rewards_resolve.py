from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megappo.rewards import arithmetic, gsm8k
from megappo.rewards.resolve import RewardError, RewardTable, resolve_reward

SOURCE = """
from dataclasses import dataclass

@dataclass
class Parts:
    a: float

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return Parts(1.0).a

def half(data_source, solution_str, ground_truth, **rest):
    return 0.5

def _private(): ...
def wrong(prompt, answer): ...
async def later(data_source, solution_str, ground_truth, extra_info=None): ...
number = 3
"""
ARGUMENTS: dict[str, Any] = {"data_source": "s", "solution_str": "1", "ground_truth": "1", "extra_info": {}}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_reward.py"
    path.write_text(SOURCE)
    return path


def test_modules_with_and_without_a_name() -> None:
    assert resolve_reward("megappo.rewards.arithmetic") is arithmetic.compute_score
    assert resolve_reward("megappo.rewards.gsm8k:compute_score_flexible") is gsm8k.compute_score_flexible


def test_files_with_and_without_a_name(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_reward(str(file))(**ARGUMENTS) == 1.0
    assert resolve_reward(f"{file}:half")(**ARGUMENTS) == 0.5
    monkeypatch.chdir(file.parent)
    assert resolve_reward("my_reward.py:half") is resolve_reward(f"{file}:half")


def test_files_of_one_name_do_not_meet(tmp_path: Path) -> None:
    scores = []
    for folder in ("a", "b"):
        path = tmp_path / folder / "reward.py"
        path.parent.mkdir()
        path.write_text(f"def compute_score(data_source, solution_str, ground_truth, extra_info): return {folder!r}")
        scores.append(resolve_reward(str(path))(**ARGUMENTS))
    assert scores == ["a", "b"]


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("megappo.rewards.gsm9k", r"no module 'megappo.rewards.gsm9k'; .*PYTHONPATH"),
        ("no_such_package.module:name", "no module 'no_such_package'"),
        ("megappo.rewards.gsm8k.compute_score", r"no module .*as package\.module:name"),
        ("megappo.rewards.gsm8k:scor", "has no 'scor'; its functions: compute_score, compute_score_flexible"),
        ("nowhere/reward.py", r"no file .*nowhere/reward\.py"),
        ("{file}:scor", "has no 'scor'; its functions: compute_score, half, wrong, later"),
        (
            "{file}:wrong",
            r"takes \(prompt, answer\).*compute_score\(data_source, solution_str, ground_truth, extra_info\)",
        ),
        ("{file}:later", "is async"),
        ("{file}:number", "is int, not a function"),
    ],
)
def test_errors_name_what_was_looked_for_and_the_fix(file: Path, reference: str, message: str) -> None:
    reference = reference.format(file=file)
    with pytest.raises(RewardError, match=message) as caught:
        resolve_reward(reference)
    assert repr(reference) in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_package", "its import failed with ModuleNotFoundError: No module named 'no_such_package'"),
        ("1 / 0", "its import failed with ZeroDivisionError: division by zero"),
        ("def f(:", "its import failed with SyntaxError"),
    ],
)
def test_an_import_that_fails_says_so_each_time(tmp_path: Path, source: str, message: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(source)
    for _ in range(2):
        with pytest.raises(RewardError, match=message):
            resolve_reward(str(path))


def test_a_table_chooses_by_source_and_falls_back_on_the_function() -> None:
    table = RewardTable("megappo.rewards.gsm8k", {"sums": "megappo.rewards.arithmetic"})
    assert table.choose("sums") is arithmetic.compute_score
    assert table.choose("anything") is gsm8k.compute_score


def test_a_source_without_a_function_names_the_sources_known() -> None:
    table = RewardTable(None, {"sums": "megappo.rewards.arithmetic", "gsm": "megappo.rewards.gsm8k"})
    with pytest.raises(RewardError, match=r"no reward for data_source 'other'; known: 'gsm', 'sums'; add it to"):
        table.choose("other")
    with pytest.raises(RewardError, match=r"set roles\.reward\.function"):
        RewardTable(None, {})
