from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from megappo.data.arithmetic import NAMES, THINGS, write_arithmetic
from megappo.rewards import arithmetic as reward


def read(paths: list[Path]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    assert [path.name for path in paths] == ["train.parquet", "validation.parquet"]
    train, validation = (pq.read_table(path).to_pylist() for path in paths)
    return train, validation


def test_plain_sums_are_right_and_the_two_files_share_no_question(tmp_path: Path) -> None:
    train, validation = read(write_arithmetic(tmp_path / "new", train=300, validation=50))
    assert (len(train), len(validation)) == (300, 50)
    assert len({row["prompt"] for row in train + validation}) == 350
    assert set(train[0]) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    for row in train + validation:
        a, b = map(int, re.fullmatch(r"(\d\d)\+(\d\d)=", row["prompt"]).groups())  # type: ignore[union-attr]
        assert row["reward_model"]["ground_truth"] == str(a + b)
        assert row["data_source"] == "arithmetic"


@pytest.mark.parametrize(("operations", "size"), [("+", 100), ("-", 55), ("*", 100), ("+-*", 255), ("++", 100)])
def test_all_questions_that_exist_can_be_had_and_no_more(tmp_path: Path, operations: str, size: int) -> None:
    # One digit: 10 x 10 pairs; for differences that are not negative, 10 * 11 / 2.
    train, validation = read(write_arithmetic(tmp_path, train=size - 5, validation=5, digits=1, operations=operations))
    rows = train + validation
    assert len({row["prompt"] for row in rows}) == size
    for row in rows:
        assert int(row["reward_model"]["ground_truth"]) == eval(row["prompt"].removesuffix("=")) >= 0
    with pytest.raises(ValueError, match=rf"{size + 1} distinct questions wanted.*only {size} exist"):
        write_arithmetic(tmp_path, train=size, validation=1, digits=1, operations=operations)


def test_many_digits_need_no_listing_and_the_seed_decides(tmp_path: Path) -> None:
    def prompts(seed: int) -> list[str]:
        rows, _ = read(write_arithmetic(tmp_path, train=20, validation=5, digits=9, operations="-*", seed=seed))
        return [row["prompt"] for row in rows]

    first = prompts(1)
    assert first == prompts(1) != prompts(2)
    assert all(len(re.findall(r"\d", prompt)) == 18 for prompt in first)


def test_chat_questions_are_messages(tmp_path: Path) -> None:
    train, _ = read(write_arithmetic(tmp_path, train=5, validation=5, chat=True))
    [message] = train[0]["prompt"]
    a, b = map(int, re.match(r"What is (\d\d) \+ (\d\d)\? ", message["content"]).groups())  # type: ignore[union-attr]
    assert message["role"] == "user"
    assert train[0]["reward_model"]["ground_truth"] == str(a + b)
    assert reward.compute_score("arithmetic", f"{a + b}", train[0]["reward_model"]["ground_truth"])["score"] == 1.0


def test_word_problems_are_distinct_and_their_answers_right(tmp_path: Path) -> None:
    train, validation = read(write_arithmetic(tmp_path, train=600, validation=60, digits=1, word_problems=True))
    assert len({row["prompt"][0]["content"] for row in train + validation}) == 660
    answers = {  # worked out from the numbers shown, in the order in which the text names them
        "finds": lambda a, b: a + b,
        "gave away": lambda a, b: a - b,
        "boxes": lambda a, b: a * b,
        "loses": lambda a, b, c: a + b - c,
        "bags": lambda a, b, c: a * b + c,
        "shares": lambda a, b, c: a // b + c,
    }
    kinds = dict.fromkeys(answers, 0)
    for row in train:
        text = row["prompt"][0]["content"]
        [kind] = [word for word in answers if word in text]
        kinds[kind] += 1
        shown = [int(number) for number in re.findall(r"\d+", row["extra_info"]["question"])]
        assert int(row["reward_model"]["ground_truth"]) == answers[kind](*shown), text
        assert text.split()[0] in NAMES and any(thing in text for thing in THINGS)
        assert text.endswith('"#### 12".')
        assert row["data_source"] == "arithmetic_word_problems"
    assert min(kinds.values()) > 60  # a sixth of 600 each, roughly


@pytest.mark.parametrize("bad", [{"operations": "/"}, {"operations": ""}, {"digits": 0}, {"digits": 10}, {"train": 0}])
def test_impossible_options_are_refused(tmp_path: Path, bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"--{next(iter(bad))}: "):
        write_arithmetic(tmp_path, **bad)
