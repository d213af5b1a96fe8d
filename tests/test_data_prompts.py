from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megappo.data.prompts import DataError, load_prompts

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'critic' %}{{ raise_exception('no critics') }}{% endif %}"
    "<{{ m.role[0] }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
SPECIAL = ["<pad>", "<eos>", "<unk>", "<u>", "<s>", "<a>"]
VOCABULARY = {token: i for i, token in enumerate([*SPECIAL, *"0123456789+=? abcdefghijklmnopqrstuvwxyz"])}


def make_tokenizer(folder: Path, template: str | None) -> Any:
    """One token a character, and a token for each role; saved and loaded, as a user's would be."""
    core = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_tokenizer(tmp_path_factory.mktemp("plain"), None)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_tokenizer(tmp_path_factory.mktemp("chat"), TEMPLATE)


def row(prompt: Any, truth: Any = "1", **more: Any) -> dict[str, Any]:
    return {"data_source": "s", "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": truth}, **more}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def ids(*tokens: str) -> list[int]:
    return [VOCABULARY[token] for token in tokens]


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_plain_string_is_tokenized_as_it_is_even_with_a_chat_template(tmp_path: Path, plain: Any, chat: Any) -> None:
    path = write(tmp_path / "a.parquet", row("1+2=", "3", ability="math", extra_info={"index": 7}))
    for tokenizer in (plain, chat):
        prompts = load_prompts([path], tokenizer, max_prompt=8)
        assert prompts.table.to_pylist() == [
            {
                "prompt_index": 0,
                "data_source": "s",
                "prompt_ids": ids(*"1+2="),
                "ground_truth": "3",
                "extra_info": '{"index": 7}',
                "prompt_text": "1+2=",
                "messages": None,
            }
        ]
        assert prompts.table.schema.field("prompt_ids").type == pa.list_(pa.int32())
        assert prompts.report == f"{path}: 1 rows, 0 over 8 tokens filtered"


def test_messages_go_through_the_chat_template(tmp_path: Path, chat: Any) -> None:
    conversation = [{"role": "system", "content": "add", "name": "x"}, *user("1+2")]
    prompts = load_prompts([write(tmp_path / "a.parquet", row(conversation))], chat, max_prompt=20)
    [found] = prompts.table.to_pylist()
    assert found["prompt_ids"] == ids("<s>", *"add", "<u>", *"1+2", "<a>")
    assert found["prompt_text"] == "<s>add<u>1+2<a>"


def test_a_tokenizer_that_adds_a_beginning_adds_it_to_plain_strings_only(tmp_path: Path, chat: Any) -> None:
    class WithBeginning:
        chat_template = TEMPLATE
        apply_chat_template = staticmethod(chat.apply_chat_template)

        def __call__(self, texts: list[str], add_special_tokens: bool, **options: Any) -> dict[str, list[list[int]]]:
            beginning = [99] if add_special_tokens else []
            return {"input_ids": [beginning + tokens for tokens in chat(texts)["input_ids"]]}

    files = [write(tmp_path / "a.parquet", row("1")), write(tmp_path / "b.parquet", row(user("1")))]
    prompts = load_prompts(files, WithBeginning(), max_prompt=20)
    assert prompts.table["prompt_ids"].to_pylist() == [[99, *ids("1")], ids("<u>", "1", "<a>")]


def test_files_with_other_columns_and_fields_are_read_one_after_the_other(tmp_path: Path, chat: Any) -> None:
    files = [
        write(tmp_path / "a.parquet", row("1", extra_info=None), row("2", extra_info={"x": 1})),
        write(tmp_path / "b.parquet", row(user("3"), ["4", "5"], extra_info={"y": ["z"], "w": None}, ability="math")),
        write(tmp_path / "c.parquet", row("6", 6), row("7", 7)),
    ]
    prompts = load_prompts(files, chat, max_prompt=20)
    assert len(prompts) == 5
    assert prompts.table["prompt_index"].to_pylist() == [0, 1, 2, 3, 4]
    assert prompts.table["ground_truth"].to_pylist() == ["1", "1", '["4", "5"]', "6", "7"]
    infos = [json.loads(info) for info in prompts.table["extra_info"].to_pylist()]
    assert infos == [{}, {"x": 1}, {"w": None, "y": ["z"]}, {}, {}]
    assert [line.split(":")[0] for line in prompts.report.splitlines()] == [str(path) for path in files]


def test_rows_come_in_the_order_asked_for_and_may_repeat(tmp_path: Path, plain: Any) -> None:
    prompts = load_prompts([write(tmp_path / "a.parquet", *(row(c) for c in "abc"))], plain, max_prompt=2)
    taken = prompts.rows(np.array([2, 0, 2]))
    assert taken["prompt_text"].to_pylist() == ["c", "a", "c"]
    assert taken["prompt_index"].to_pylist() == [2, 0, 2]


def test_long_prompts_are_filtered_or_cut_and_counted(tmp_path: Path, plain: Any) -> None:
    path = write(tmp_path / "a.parquet", row("abcd"), row("abc"), row("uvwxyz"))
    filtered = load_prompts([path], plain, max_prompt=3, overlong="filter")
    assert filtered.table["prompt_text"].to_pylist() == ["abc"]
    assert filtered.table["prompt_index"].to_pylist() == [0]
    assert filtered.report == f"{path}: 3 rows, 2 over 3 tokens filtered"
    cut = load_prompts([path], plain, max_prompt=3, overlong="cut")
    assert cut.table["prompt_text"].to_pylist() == ["bcd", "abc", "xyz"]
    assert cut.table["prompt_ids"].to_pylist()[2] == ids(*"xyz")
    assert cut.report == f"{path}: 3 rows, 2 over 3 tokens cut to their last tokens"


def test_rows_of_several_batches_keep_their_order(tmp_path: Path, plain: Any) -> None:
    path = write(tmp_path / "a.parquet", *(row(f"{i}", str(i)) for i in range(5000)))
    prompts = load_prompts([path], plain, max_prompt=4)
    assert prompts.table["ground_truth"].to_pylist() == [str(i) for i in range(5000)]
    assert prompts.table["prompt_text"].to_pylist() == [str(i) for i in range(5000)]


def test_messages_without_a_chat_template_name_the_folder_and_the_fix(tmp_path: Path, plain: Any) -> None:
    path = write(tmp_path / "a.parquet", row(user("1")))
    with pytest.raises(DataError) as caught:
        load_prompts([path], plain, max_prompt=9)
    assert plain.name_or_path in str(caught.value)
    assert "chat_template.jinja" in str(caught.value)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path, plain: Any) -> None:
    with pytest.raises(DataError, match=r"nowhere\.parquet: no such file"):
        load_prompts([tmp_path / "nowhere.parquet"], plain, max_prompt=9)
    with pytest.raises(DataError, match="is a folder"):
        load_prompts([tmp_path], plain, max_prompt=9)
    with pytest.raises(DataError, match="no prompt files"):
        load_prompts([], plain, max_prompt=9)


@pytest.mark.parametrize("keep", [0, 3, 40, 200, -1])
def test_a_truncated_file_is_said_to_be_so(tmp_path: Path, plain: Any, keep: int) -> None:
    path = write(tmp_path / "cut.parquet", *(row("1+2=") for _ in range(20)))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"cut\.parquet: truncated, or not a parquet file"):
        load_prompts([path], plain, max_prompt=9)


def test_a_file_damaged_in_its_data_is_said_to_be_so(tmp_path: Path, plain: Any) -> None:
    path = write(
        tmp_path / "bad.parquet", *(row("".join(chr(97 + (i * j) % 26) for j in range(99))) for i in range(99))
    )
    content = bytearray(path.read_bytes())
    content[4:600] = b"\xff" * 596  # the footer stays whole
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"bad\.parquet: truncated, or not a parquet file"):
        load_prompts([path], plain, max_prompt=200)


def test_a_missing_column_names_the_file_and_the_columns_it_has(tmp_path: Path, plain: Any) -> None:
    path = write(tmp_path / "a.parquet", {"question": "1", "data_source": "s"})
    with pytest.raises(DataError) as caught:
        load_prompts([path], plain, max_prompt=9)
    assert f"{path}: missing column prompt, reward_model; it has question, data_source" in str(caught.value)


def test_no_rows_is_an_error(tmp_path: Path, plain: Any) -> None:
    path = tmp_path / "empty.parquet"
    pq.write_table(pa.Table.from_pylist([row("1")]).slice(0, 0), path)
    with pytest.raises(DataError, match=r"empty\.parquet: no rows"):
        load_prompts([path], plain, max_prompt=9)


def test_all_prompts_filtered_out_is_an_error_with_the_longest(tmp_path: Path, plain: Any) -> None:
    path = write(tmp_path / "a.parquet", row("abcde"), row("abcdefg"))
    with pytest.raises(DataError, match=r"every one is over data\.max_prompt, 3 tokens \(the longest has 7\)"):
        load_prompts([path], plain, max_prompt=3)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row(""), "row 1 .*prompt is empty"),
        (row(None), "row 1 .*prompt is empty"),
        (row("2", None), "row 1 .*ground_truth is null"),
        ({**row("2"), "reward_model": None}, "row 1 .*ground_truth is null"),
        ({**row("2"), "data_source": None}, "row 1: data_source is None; it must be a string"),
    ],
)
def test_a_bad_row_is_named_by_its_number(tmp_path: Path, plain: Any, bad: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "a.parquet", row("1"), bad)
    with pytest.raises(DataError, match=rf"a\.parquet, {message}"):
        load_prompts([path], plain, max_prompt=9)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt is empty"),
        ([{"role": "user", "content": None}], "a role and a content that are strings"),
        ([{"role": "user", "text": "1"}], "a role and a content that are strings"),
        ([1, 2], "a role and a content that are strings"),
        (5, "a role and a content that are strings"),
        ([{"role": "critic", "content": "1"}], "the chat template refuses the messages: no critics"),
    ],
)
def test_bad_messages_are_refused(tmp_path: Path, chat: Any, prompt: Any, message: str) -> None:
    path = write(tmp_path / "a.parquet", row(prompt))
    with pytest.raises(DataError, match=rf"a\.parquet, row 0 .*{message}"):
        load_prompts([path], chat, max_prompt=9)


@pytest.mark.parametrize("reward_model", ["42", {"style": "rule"}])
def test_a_reward_model_without_a_ground_truth_is_refused(tmp_path: Path, plain: Any, reward_model: Any) -> None:
    path = write(tmp_path / "a.parquet", {**row("1"), "reward_model": reward_model})
    with pytest.raises(DataError, match="it must be a struct with ground_truth"):
        load_prompts([path], plain, max_prompt=9)


@pytest.mark.parametrize("bad", [{"max_prompt": 0}, {"overlong": "truncate"}])
def test_impossible_options_are_refused(tmp_path: Path, plain: Any, bad: dict[str, Any]) -> None:
    path = write(tmp_path / "a.parquet", row("1"))
    with pytest.raises(ValueError, match=next(iter(bad))):
        load_prompts([path], plain, **{"max_prompt": 9, **bad})
