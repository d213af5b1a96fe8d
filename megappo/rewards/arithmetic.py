"""Reward for bare sums: the response must start with the right integer."""

from __future__ import annotations

import re
from typing import Any

# Neither the start of a longer number ("4" in "46") nor of a decimal or grouped one ("46.5", "46,000").
LEADING_INTEGER = re.compile(r"\s*([-+]?)0*([0-9]+)(?![0-9]|[.,][0-9])")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float | str]:
    """1 where the response, leading white space aside, starts with the integer `ground_truth`; else 0.

    What follows the integer is ignored, so that a model need not learn when to stop before it is rewarded.
    """
    answer = _leading_integer(solution_str)
    correct = float(answer is not None and answer == _leading_integer(ground_truth))
    return {"score": correct, "acc": correct, "pred": answer or ""}


def _leading_integer(text: str) -> str | None:
    """In canonical spelling. A string, not an int: Python refuses to parse thousands of digits."""
    match = LEADING_INTEGER.match(text)
    if match is None:
        return None
    sign, digits = match.groups()
    return f"-{digits}" if sign == "-" and digits != "0" else digits
