"""Reward for GSM8K word problems: the number after `####`.

The answer format is that of the data set (Cobbe et al., "Training Verifiers to Solve Math Word Problems", 2021).
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from megappo.data.marked_answers import AFTER_HASHES, NUMBER

MAX_DIGITS = 40  # written out
ANY = re.compile(rf"(?<![0-9.,])(?:(?<=[0-9A-Za-z)])-)?({NUMBER})")  # the minus of "10-3" is no sign


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    method: Literal["strict", "flexible"] = "strict",
) -> dict[str, float | str]:
    """1 where the response's answer equals `ground_truth` as a number, else 0; `format` says if `####` was followed.

    `strict` takes the last number after `####`. `flexible` falls back on the last number anywhere. `ground_truth` is
    the number, or a whole GSM8K solution that ends in it. Commas, dollar signs, trailing zeros and dots do not matter.
    """
    answer = extract_answer(solution_str)
    formatted = float(answer is not None)
    if answer is None and method == "flexible":
        answer = _last(ANY, solution_str)
    truth = extract_answer(ground_truth)
    if truth is None:
        truth = _number(ground_truth)
    correct = float(answer is not None and answer == truth)
    return {"score": correct, "acc": correct, "format": formatted, "pred": "" if answer is None else _spelling(answer)}


def compute_score_flexible(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float | str]:
    """`compute_score` with `method="flexible"`, to be named in a config."""
    return compute_score(data_source, solution_str, ground_truth, extra_info, method="flexible")


def extract_answer(text: str) -> Decimal | None:
    """The last number after `####`, or None."""
    return _last(AFTER_HASHES, text)


def _last(pattern: re.Pattern[str], text: str) -> Decimal | None:
    found = pattern.findall(text)
    return _number(found[-1]) if found else None


def _spelling(number: Decimal) -> str:
    """One for all spellings of a number: 72 for 72.00 and +72."""
    return f"{number.normalize():f}" if abs(number.adjusted()) < MAX_DIGITS else str(number.normalize())


def _number(text: str) -> Decimal | None:
    try:
        return Decimal(text.strip().replace(",", "").replace("$", "").rstrip(".%"))
    except InvalidOperation:
        return None
