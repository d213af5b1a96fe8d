"""Prompts from parquet files in verl's columns: `data_source, prompt, ability, reward_model, extra_info`.

`prompt` is a list of chat messages `{role, content}`, which go through the tokenizer's chat template, or a plain
string, which is tokenized as it is: no template, only the special tokens that the tokenizer itself adds (Llama's
beginning-of-sequence token, say). `reward_model` is a struct with `ground_truth`. The other columns may be absent.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA = pa.schema(
    [
        ("prompt_index", pa.int64()),
        ("data_source", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("ground_truth", pa.string()),
        ("extra_info", pa.string()),
        ("prompt_text", pa.string()),
        ("messages", pa.string()),
    ]
)
REQUIRED = ("data_source", "prompt", "reward_model")
OPTIONAL = ("extra_info",)
BATCH_ROWS = 2048  # rows read and tokenized at once: bounds memory, and keeps the tokenizer's threads busy


class DataError(ValueError):
    """A prompt file that cannot be used; the message names the file, the place and the fix."""


@dataclass(frozen=True)
class PromptSet:
    """The prompts of one or several files, ready to generate from.

    `table` has a row a prompt: `prompt_index` int64 (the row's own position), `data_source` string, `prompt_ids`
    list<int32>, `ground_truth` string (JSON where it is not a string), `extra_info` string (JSON), `prompt_text`
    string (what the model sees, before tokenization) and `messages` string (the chat messages as JSON, null where the
    prompt is a plain string). `report` says for people what was read, one line a file.
    """

    table: pa.Table
    report: str

    def __len__(self) -> int:
        return self.table.num_rows

    def texts(self) -> Iterator[str]:
        """Each prompt as it is in its file: a string, or messages as JSON."""
        for row in self.table.select(["messages", "prompt_text"]).to_pylist():
            yield row["prompt_text"] if row["messages"] is None else row["messages"]

    def rows(self, indices: Sequence[int] | np.ndarray) -> pa.Table:
        """The rows at `indices`, int `[n]`, in that order; an index may come more than once."""
        return self.table.take(pa.array(np.asarray(indices, dtype=np.int64)))


def load_prompts(
    files: Sequence[str | Path], tokenizer: Any, *, max_prompt: int, overlong: Literal["filter", "cut"] = "filter"
) -> PromptSet:
    """Read, render and tokenize prompts.

    Args:
        files: parquet files, read in this order. Their optional columns and the fields of `extra_info` may differ.
        tokenizer: a Hugging Face tokenizer.
        max_prompt: most tokens a prompt may have.
        overlong: what to do with a longer one: `filter` drops it, `cut` keeps its last `max_prompt` tokens.

    Raises:
        DataError: a file that is missing, truncated, empty or lacks a column; an empty prompt; a null ground truth;
            chat messages without a chat template; no prompt left after filtering.
    """
    if overlong not in ("filter", "cut"):
        raise ValueError(f"overlong is {overlong!r}; it must be 'filter' or 'cut'")
    if max_prompt < 1:
        raise ValueError(f"max_prompt is {max_prompt}; it must be at least 1")
    if not files:
        raise DataError("no prompt files are named; name at least one parquet file")

    columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    report: list[str] = []
    longest = 0
    for path in map(Path, files):
        total = over = 0
        for first_row, rows in read_rows(path, REQUIRED, OPTIONAL):
            texts, ids = tokenize_prompts(path, first_row, [row["prompt"] for row in rows], tokenizer)
            for offset, (row, text, tokens) in enumerate(zip(rows, texts, ids, strict=True)):
                where = f"{path}, row {first_row + offset}"
                if not tokens:
                    raise DataError(f"{where} (counting from 0): the prompt is empty; remove the row")
                truth = ground_truth(where, row["reward_model"])
                source = row["data_source"]
                if not isinstance(source, str):
                    raise DataError(f"{where}: data_source is {source!r}; it must be a string")
                longest = max(longest, len(tokens))
                if len(tokens) > max_prompt:
                    over += 1
                    if overlong == "filter":
                        continue
                    tokens = tokens[-max_prompt:]
                    text = tokenizer.decode(tokens)
                columns["prompt_ids"].append(tokens)
                for name, value in prompt_columns(row, text, truth).items():
                    columns[name].append(value)
            total += len(rows)
        if total == 0:
            raise DataError(f"{path}: no rows; name a file with at least one prompt")
        action = {"filter": "filtered", "cut": "cut to their last tokens"}[overlong]
        report.append(f"{path}: {total:,} rows, {over:,} over {max_prompt:,} tokens {action}")

    if not columns["prompt_ids"]:
        raise DataError(
            f"all prompts of {', '.join(map(str, files))} were filtered out: every one is over data.max_prompt, "
            f"{max_prompt:,} tokens (the longest has {longest:,}); raise data.max_prompt or set data.overlong to cut"
        )
    columns["prompt_index"] = list(range(len(columns["prompt_ids"])))
    return PromptSet(pa.table(columns, schema=SCHEMA), "\n".join(report))


def read_rows(
    path: Path, required: Sequence[str], optional: Sequence[str]
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Batches of a parquet file's rows as Python objects, each with the number of its first row in the file.

    Raises:
        DataError: a file that is missing or no parquet file, or lacks a required column.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file; give the path of a parquet file")
    if path.is_dir():
        raise DataError(f"{path}: is a folder; name the parquet files in it")
    try:
        with pq.ParquetFile(path) as file:
            present = file.schema_arrow.names
            missing = [name for name in required if name not in present]
            if missing:
                raise DataError(
                    f"{path}: missing column {', '.join(missing)}; it has {', '.join(present) or 'none'}; "
                    f"it needs {', '.join(required)}"
                )
            names = [name for name in (*required, *optional) if name in present]
            row = 0
            for batch in file.iter_batches(BATCH_ROWS, columns=names):
                yield row, batch.to_pylist()
                row += batch.num_rows
    except (pa.ArrowInvalid, OSError) as error:  # pyarrow reports a damaged file as either
        reason = str(error).splitlines()[0]
        raise DataError(f"{path}: truncated, or not a parquet file ({reason}); write it again") from error


def tokenize_prompts(
    path: Path, first_row: int, prompts: list[str | list[dict[str, Any]]], tokenizer: Any
) -> tuple[list[str], list[list[int]]]:
    """The rendered text and the token ids of each prompt: chat messages or a plain string.

    Raises:
        DataError: an empty prompt, or messages that cannot be rendered, named by file and row.
    """
    texts: list[str] = []
    chat: list[bool] = []
    for row, prompt in enumerate(prompts, first_row):
        where = f"{path}, row {row} (counting from 0)"
        if not prompt:
            raise DataError(f"{where}: the prompt is empty; remove the row")
        chat.append(not isinstance(prompt, str))
        texts.append(prompt if isinstance(prompt, str) else _render(where, prompt, tokenizer))
    ids: list[list[int]] = [[] for _ in prompts]
    # A chat template writes its special tokens itself, so that the tokenizer must not add them again.
    for is_chat in set(chat):
        chosen = [i for i, flag in enumerate(chat) if flag == is_chat]
        encoded = tokenizer(
            [texts[i] for i in chosen], add_special_tokens=not is_chat, return_attention_mask=False, verbose=False
        )
        for i, tokens in zip(chosen, encoded["input_ids"], strict=True):
            ids[i] = tokens
    return texts, ids


def _render(where: str, messages: Any, tokenizer: Any) -> str:
    if not tokenizer.chat_template:
        raise DataError(
            f"{where}: the prompt is a list of chat messages, but the tokenizer in {tokenizer.name_or_path!r} has no "
            "chat template; add chat_template.jinja to that folder, or write prompts as plain strings"
        )
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    ):
        raise DataError(
            f"{where}: the prompt is {str(messages)[:80]!r}; it must be a string or a list of messages, "
            "each with a role and a content that are strings"
        )
    try:
        return tokenizer.apply_chat_template(conversation(messages), add_generation_prompt=True, tokenize=False)
    except Exception as error:  # templates raise what they like (roles that do not alternate, say)
        raise DataError(f"{where}: the chat template refuses the messages: {error}") from error


def prompt_columns(row: dict[str, Any], text: str, truth: str) -> dict[str, str | None]:
    """What a prompt set keeps of a row beside its tokens, by column of :data:`SCHEMA`."""
    return {
        "data_source": row["data_source"],
        "ground_truth": truth,
        "extra_info": _json(row.get("extra_info") or {}),
        "prompt_text": text,
        "messages": None if isinstance(row["prompt"], str) else _json(conversation(row["prompt"])),
    }


def conversation(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Chat messages without the nulls of Arrow, which gives every message the fields of all others."""
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def ground_truth(where: str, reward_model: Any) -> str:
    """The answer in a ``reward_model`` struct, as JSON where it is no string.

    Raises:
        DataError: there is none.
    """
    if reward_model is not None and not (isinstance(reward_model, dict) and "ground_truth" in reward_model):
        raise DataError(f"{where}: reward_model is {str(reward_model)[:80]!r}; it must be a struct with ground_truth")
    truth = None if reward_model is None else reward_model["ground_truth"]
    if truth is None:
        raise DataError(f"{where} (counting from 0): reward_model.ground_truth is null; fill it or remove the row")
    return truth if isinstance(truth, str) else _json(truth)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
