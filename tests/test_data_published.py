"""What each published data set becomes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from published_files import (
    dialogue,
    gsm8k_rows,
    hellaswag_row,
    hh_rows,
    math_row,
    read,
    write_lines,
    write_parquet,
)
from small_project import make_project
from test_data_prompts import TEMPLATE, make_tokenizer

from megappo.data.prompts import DataError, load_prompts
from megappo.data.published.dataset import Unusable
from megappo.data.published.hh_rlhf import parse_dialogue
from megappo.data.published.write import Written, write_dataset
from megappo.rewards import gsm8k, math, multiple_choice

VERL = ["data_source", "prompt", "ability", "reward_model", "extra_info"]


def test_gsm8k_in_verls_columns(tmp_path: Path) -> None:
    write_parquet(tmp_path / "src/main/train-00000-of-00001.parquet", gsm8k_rows(5))
    write_parquet(tmp_path / "src/main/test-00000-of-00001.parquet", gsm8k_rows(2, start=100))
    write_parquet(tmp_path / "src/socratic/train-00000-of-00001.parquet", gsm8k_rows(5))
    written = write_dataset("gsm8k", tmp_path / "src", tmp_path / "out")
    train, validation = tmp_path / "out/train.parquet", tmp_path / "out/validation.parquet"
    assert written.rows == {train: 5, validation: 2}
    assert pq.read_schema(train).names == VERL
    assert read(validation)[1] == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {
                "role": "user",
                "content": "Ann has 101 pens and buys 1101. How many has she? "
                'Let\'s think step by step and output the final answer after "####".',
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1202"},
        "extra_info": {
            "split": "test",
            "index": 1,
            "answer": "She has 101 + 1101 = <<101+1101=1202>>1202.\n#### 1,202",
            "question": "Ann has 101 pens and buys 1101. How many has she?",
        },
    }
    [note] = written.notes
    assert note == (f"left out {tmp_path}/src/socratic/train-00000-of-00001.parquet: give one as SRC to use it instead")
    for row in read(train):
        assert gsm8k.compute_score("", row["extra_info"]["answer"], row["reward_model"]["ground_truth"])["score"] == 1


@pytest.mark.parametrize(
    ("end", "truth"),
    [("#### 72", "72"), ("####1,234,567", "1234567"), ("#### -3.5", "-3.5"), ("#### 1\n#### $2,000", "2000")],
)
def test_gsm8k_answers(tmp_path: Path, end: str, truth: str) -> None:
    rows = [{"question": f"{i}?", "answer": f"so {end}"} for i in range(2)]
    write_dataset("gsm8k", write_lines(tmp_path / "x.jsonl", rows), tmp_path / "out", validation=1, instruction="")
    [row] = read(tmp_path / "out/train.parquet")
    assert row["reward_model"]["ground_truth"] == truth
    assert row["prompt"][0]["content"] in ("0?", "1?")  # no instruction, and no blank after the question


@pytest.mark.parametrize(
    ("box", "truth"),
    [
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\fbox{\text{(A)}}", r"\text{(A)}"),
        (r"\boxed 7", "7"),
        (r"\boxed{\left\{1,2\right\}}", r"\left\{1,2\right\}"),
    ],
)
def test_math_takes_what_the_last_box_holds(tmp_path: Path, box: str, truth: str) -> None:
    write_parquet(tmp_path / "src/data/train-00000-of-00001.parquet", [math_row(box)])
    write_parquet(tmp_path / "src/data/test-00000-of-00001.parquet", [math_row(box, 1)])
    write_dataset("math", tmp_path / "src", tmp_path / "out", instruction="Box it.")
    [row] = read(tmp_path / "out/train.parquet")
    assert row["reward_model"] == {"style": "rule", "ground_truth": truth}
    assert row["prompt"] == [{"role": "user", "content": r"Compute $\frac{1}{2}$. Box it."}]
    assert row["data_source"] == "lighteval/MATH"
    assert (row["extra_info"]["level"], row["extra_info"]["type"]) == ("Level 1", "Prealgebra")
    assert math.compute_score("", row["extra_info"]["answer"], truth)["score"] == 1


def test_math_as_its_authors_publish_it(tmp_path: Path) -> None:
    for split, count in (("train", 11), ("test", 2)):
        for i in range(count):
            write_lines(tmp_path / f"MATH/{split}/algebra/{i}.json", [math_row(number=i)])
    write_dataset("math", tmp_path / "MATH", tmp_path / "out")
    train, validation = read(tmp_path / "out/train.parquet"), read(tmp_path / "out/validation.parquet")
    assert (len(train), len(validation)) == (11, 2)
    assert r"{11}{22}" in train[10]["prompt"][0]["content"]  # 10.json comes after 9.json
    assert train[0]["prompt"][0]["content"].endswith(r"output the final answer within \boxed{}.")


def test_hellaswag_is_lettered(tmp_path: Path) -> None:
    wikihow = hellaswag_row(
        activity_label="Home and Garden",
        ctx_a="[header] How to wash a cat [title] Get water. [step] Warm water.",
        ctx_b="",
        ctx="[header] How to wash a cat [title] Get water. [step] Warm water.",
        endings=["Dry it. [substeps] Rub.", "Eat it.", "Go.", "Run."],
        label=0,  # a number in the authors' own files
    )
    write_lines(tmp_path / "src/hellaswag_train.jsonl", [hellaswag_row()])
    write_lines(tmp_path / "src/hellaswag_val.jsonl", [wikihow])
    unlabelled = {name: value for name, value in hellaswag_row().items() if name != "label"}
    write_lines(tmp_path / "src/hellaswag_test.jsonl", [unlabelled])
    written = write_dataset("hellaswag", tmp_path / "src", tmp_path / "out")
    assert written.notes == ("test split: not used",)
    [train], [validation] = read(tmp_path / "out/train.parquet"), read(tmp_path / "out/validation.parquet")
    assert train["prompt"][0]["content"] == (
        "Removing ice from car: Then, the man writes over the snow covering the window of a car. Then\n"
        "A. , the man adds wax.\nB. , a person boards a ski lift.\nC. , he scrapes it.\nD. , the man stops.\n"
        'Which ending fits best? Finish with its letter alone, as in "Answer: A".'
    )
    assert train["reward_model"] == {"style": "rule", "ground_truth": "C"}
    assert train["extra_info"]["answer"] == ", he scrapes it."
    assert validation["extra_info"]["question"] == "Home and Garden: How to wash a cat. Get water. Warm water."
    assert validation["extra_info"]["choices"] == ["Dry it. Rub.", "Eat it.", "Go.", "Run."]
    assert validation["reward_model"]["ground_truth"] == "A"
    assert validation["extra_info"]["split"] == "validation"
    assert multiple_choice.compute_score("", "Answer: C", "C")["score"] == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"label": ""}, "no label"),
        ({"label": "4"}, "label is not one of 0 to 3"),
        ({"label": "x"}, "label is not one of 0 to 3"),
        ({"endings": ["a"]}, "endings is no list"),
        ({"endings": ["a", "[step]"]}, "an empty ending"),
        ({"ctx": None, "ctx_b": ""}, "no ctx"),
    ],
)
def test_hellaswag_rows_without_an_answer_are_named(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    rows = [hellaswag_row(ctx_b=f"he {i}") for i in range(3)]
    rows[1] |= changes
    path = write_lines(tmp_path / "train.jsonl", rows)
    [note] = write_dataset("hellaswag", path, tmp_path / "out", validation=1).notes
    assert f"train split: 1 of 3 rows left out: {reason}" in note
    assert f"({path} row 1; counting from 0)" in note


@pytest.mark.parametrize(
    ("response", "choice"),
    [
        ("I think so. Answer: B", "B"),
        ("**Answer:** B", "B"),
        ("Answer: **(B)**.", "B"),
        ("the answer is (B). It is", "B"),
        ("ANSWER: B) the man stops.", "B"),
        ("Answer: A\nNo, wait.\nAnswer: B\nbecause", "B"),
        (r"So $\boxed{B}$.", "B"),
        ("#### B", "B"),
        (" (B) ", "B"),
        ("B.", "B"),
        ("Answer: A, B, C or D", None),
        ("Answer: A. B. C.", None),
        ("Answer: A or B", None),
        ("Answer: B\nAnswer: A or B", None),
        ("answer: b", None),
        ("The answer is A man", None),
        ("Answer: Because", None),
        ("B is good", None),
        ("", None),
    ],
)
def test_multiple_choice(response: str, choice: str | None) -> None:
    assert multiple_choice.extract_choice(response) == choice
    result = multiple_choice.compute_score("Rowan/hellaswag", response, "B", {})
    right = float(choice == "B")
    assert result == {"score": right, "acc": right, "format": float(choice is not None), "pred": choice or ""}


@pytest.mark.parametrize("unit", ["Answer: ", "answer ", ")", "A. ", "*", "\n", "#### A", r"\boxed{"])
def test_multiple_choice_is_quick_on_hostile_text(unit: str) -> None:
    multiple_choice.compute_score("", "Answer: A" + unit * 20_000 + "!", "A")  # pytest would not end


def test_hh_rlhf_gives_prompts_pairs_and_supervised_text(tmp_path: Path) -> None:
    for name in ("harmless-base", "helpful-base"):
        write_lines(tmp_path / f"src/{name}/train.jsonl.gz", hh_rows(3))
        write_lines(tmp_path / f"src/{name}/test.jsonl.gz", hh_rows(1))
    write_lines(tmp_path / "src/red-team-attempts/red_team_attempts.jsonl.gz", [{"transcript": "x"}])
    written = write_dataset("hh-rlhf", tmp_path / "src", tmp_path / "out")
    names = [f"{folder}/{part}.parquet" for folder in ("prompts", "pairs", "sft") for part in ("train", "validation")]
    assert {str(path.relative_to(tmp_path / "out")): rows for path, rows in written.rows.items()} == {
        name: 6 if "train" in name else 2 for name in names
    }
    [note] = written.notes
    assert "red_team_attempts.jsonl.gz: give one as SRC" in note

    conversation = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": "What is 1?"},
    ]
    assert pq.read_schema(tmp_path / "out/prompts/train.parquet").names == VERL
    prompt = read(tmp_path / "out/prompts/train.parquet")[4]
    assert prompt["data_source"] == "Anthropic/hh-rlhf"
    assert prompt["prompt"] == conversation
    assert prompt["reward_model"] == {"style": "model", "ground_truth": "A number, 1."}
    assert prompt["extra_info"] == {"split": "train", "index": 4, "answer": "A number, 1.", "question": "What is 1?"}
    origin = {"data_source": "Anthropic/hh-rlhf", "extra_info": {"split": "train", "index": 4}}
    pair = read(tmp_path / "out/pairs/train.parquet")[4]
    assert pair == {"prompt": conversation, "chosen": "A number, 1.", "rejected": "Go away.", **origin}
    assert read(tmp_path / "out/sft/train.parquet")[4] == {"prompt": conversation, "response": "A number, 1.", **origin}


def test_hh_rlhf_instruction_is_a_system_message(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", hh_rows(2))
    write_dataset("hh-rlhf", path, tmp_path / "out", validation=1, instruction="Be brief.")
    for folder in ("prompts", "pairs", "sft"):
        [row] = read(tmp_path / f"out/{folder}/train.parquet")
        assert row["prompt"][0] == {"role": "system", "content": "Be brief."}
        assert [message["role"] for message in row["prompt"][1:]] == ["user", "assistant", "user"]


def test_hh_rlhf_names_every_row_that_it_leaves_out(tmp_path: Path) -> None:
    good = dialogue("Hi", "Hello")
    bad: list[tuple[str | None, str | None]] = [
        (good, good),
        (good, dialogue("Ho", "Bye")),
        (good, dialogue("Hi", "")),
        (good, dialogue("Hi")),
        (dialogue("Hi", " "), good),
        (dialogue("Hi", "", "Well?", "Yes"), good),
        ("Hi there", good),
        ("\n\nAssistant: Hi", good),
        (None, good),
    ]
    rows = [*hh_rows(5), *({"chosen": chosen, "rejected": rejected} for chosen, rejected in bad)]
    path = write_lines(tmp_path / "x.jsonl", rows)
    written = write_dataset("hh-rlhf", path, tmp_path / "out", validation=1)
    reasons = [
        "left out of the pairs: chosen and rejected are equal",
        "left out of the pairs: chosen and rejected do not share the prompt",
        "left out of the pairs: rejected has an empty response",
        'left out of the pairs: rejected does not end with an "Assistant:" turn',
        "left out: chosen has an empty response",
        "left out: chosen has an empty turn",
        'left out: chosen does not start with a "Human:" turn',
        "left out: no chosen",
    ]
    assert [note.split(" rows ", 1)[1].rsplit(" (", 1)[0] for note in written.notes] == reasons
    assert written.notes[0] == f"train split: 1 of 14 rows {reasons[0]} ({path} row 5; counting from 0)"
    assert f"2 of 14 rows {reasons[6]} ({path} rows 11, 12; counting from 0)" in written.notes[6]
    counts = {path.parent.name: 0 for path in written.rows}
    for path, count in written.rows.items():
        counts[path.parent.name] += count
    assert counts == {"prompts": 9, "pairs": 5, "sft": 9}


def test_dialogues_keep_their_turns() -> None:
    text = dialogue("Hi", "Hello", "A list:\n\n1. Human: no turn", "Yes\n\nOf course: Assistant: neither")
    prompt, response = parse_dialogue(text)
    assert [(m["role"], m["content"]) for m in prompt] == [
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", "A list:\n\n1. Human: no turn"),
    ]
    assert response == "Yes\n\nOf course: Assistant: neither"


def test_turns_of_one_role_in_a_row_become_one_message() -> None:
    text = "\n\nHuman: Hi\n\nHuman: Anyone?\n\nAssistant: Yes\n\nAssistant: Me."
    assert parse_dialogue(text) == ([{"role": "user", "content": "Hi\n\nAnyone?"}], "Yes\n\nMe.")
    with pytest.raises(Unusable, match="does not end"):
        parse_dialogue(text + "\n\nHuman: Oh.")


@pytest.mark.parametrize("name", ["gsm8k", "math", "hellaswag", "hh-rlhf"])
def test_a_run_accepts_what_is_written(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {
        "gsm8k": gsm8k_rows(20),
        "math": [math_row(number=i) for i in range(20)],
        "hellaswag": [hellaswag_row(ctx_b=f"he {i}") for i in range(20)],
        "hh-rlhf": hh_rows(20),
    }[name]
    monkeypatch.chdir(tmp_path)
    project = make_project(tmp_path)
    out = Path("data/prompts" if name == "hh-rlhf" else "data")
    write_dataset(name, write_lines(tmp_path / "source.jsonl", rows), "data", validation=5)
    reward = {"gsm8k": "gsm8k", "math": "math", "hellaswag": "multiple_choice", "hh-rlhf": "arithmetic"}[name]
    files = [f"data.{key}={out / key}.parquet" for key in ("train", "validation")]
    overrides = [*files, f"roles.reward.function=megappo.rewards.{reward}"]
    [error] = project.report(*overrides).errors
    assert "its prompts are chat messages" in error and "has no chat template" in error
    tokenizer = make_tokenizer(tmp_path / "tokenizer", TEMPLATE)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tmp_path / "tokenizer" / file, tmp_path / "model" / file)
    report = project.report(*overrides)
    assert report.errors == ()
    prompts = load_prompts([out / "train.parquet", out / "validation.parquet"], tokenizer, max_prompt=2000)
    assert len(prompts) == 20
    assert all(text.startswith("<u>") and text.endswith("<a>") for text in prompts.table["prompt_text"].to_pylist())


def test_nothing_usable_is_an_error_that_says_why(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [{"question": "Why?", "answer": "So."}] * 7)
    with pytest.raises(
        DataError, match=r"no row is left for it.*\n.*7 of 7 rows left out: no number after ####"
    ) as error:
        write_dataset("gsm8k", path, tmp_path / "out")
    assert "rows 0, 1, 2, 3, 4 and 2 more; counting from 0" in str(error.value)
    assert not list((tmp_path / "out").iterdir())


def test_a_split_by_chance_keeps_equal_prompts_together_and_the_seed_decides(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", gsm8k_rows(50) * 2)

    def questions(seed: int, count: int | None = 10) -> tuple[list[str], list[str]]:
        written: Written = write_dataset("gsm8k", path, tmp_path / "out", validation=count, seed=seed)
        assert sum(written.rows.values()) == 100
        files = [read(tmp_path / f"out/{part}.parquet") for part in ("train", "validation")]
        train, validation = ([row["extra_info"]["question"] for row in rows] for rows in files)
        return train, validation

    train, validation = questions(1)
    assert (len(train), len(validation), len(set(validation))) == (80, 20, 10)
    assert not set(train) & set(validation)
    assert questions(1) == (train, validation) != questions(2)
    assert len(questions(1, None)[1]) == 4  # by default a twentieth of the 50
    with pytest.raises(DataError, match=r"50 questions wanted for validation, but the train split has 50"):
        questions(1, 50)
