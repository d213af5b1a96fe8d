"""HellaSwag (Zellers et al., "HellaSwag: Can a Machine Really Finish Your Sentence?", 2019): which ending fits?

The endings are lettered choices, and the ground truth is the letter, for `megappo.rewards.multiple_choice`. The test
split is published without labels, so the validation split is what serves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from string import ascii_uppercase
from typing import Any

import pyarrow as pa

from megappo.data.published.dataset import Converted, Dataset, Unusable, prompt_schema, question, text


def _convert(row: Mapping[str, Any], instruction: str) -> Converted:
    context = _clean(text(row, "ctx"))
    start = row["ctx_b"]
    if isinstance(start, str) and start:  # ctx is ctx_a and ctx_b, a new sentence whose first letter is mostly small
        context = _clean(f"{row['ctx_a'] or ''} {start[0].upper()}{start[1:]}")
    if row["activity_label"]:
        context = f"{row['activity_label']}: {context}"
    endings = row["endings"]
    if not isinstance(endings, list) or not 2 <= len(endings) <= 26 or not all(isinstance(e, str) for e in endings):
        raise Unusable("endings is no list of 2 to 26 texts")
    choices = [_clean(ending) for ending in endings]
    if not all(choices):
        raise Unusable("an empty ending")
    label = _label(row["label"], len(choices))
    lines = (f"{letter}. {choice}" for letter, choice in zip(ascii_uppercase, choices, strict=False))
    prompt = "\n".join([context, *lines]) + "\n" * bool(instruction)
    more = {"answer": choices[label], "question": context, "choices": choices}
    return question("Rowan/hellaswag", "commonsense", prompt, instruction, ascii_uppercase[label], **more)


def _label(value: Any, choices: int) -> int:
    if value is None or value == "":
        raise Unusable("no label (the published test split has none)")
    if not re.fullmatch("[0-9]{1,2}", str(value)) or int(value) >= choices:
        raise Unusable(f"label is not one of 0 to {choices - 1}")
    return int(value)


def _clean(text: str) -> str:
    """Without the WikiHow marks: `[title]` starts a new sentence, `[header]`, `[step]` and the like are dropped."""
    text = re.sub(r"\[[^\]]*\]", "", text.replace(" [title]", ". "))
    return re.sub(r"\s+", " ", text).strip()


DATASET = Dataset(
    name="hellaswag",
    required=("ctx", "endings", "label"),
    optional=("ctx_a", "ctx_b", "activity_label"),
    schemas={"": prompt_schema(("choices", pa.list_(pa.string())))},
    convert=_convert,
    held_out=("validation", "test"),
)
