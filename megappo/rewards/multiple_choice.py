"""Reward for multiple choice: the letter after the last `Answer:`."""

from __future__ import annotations

import re
from typing import Any

# The letter may be in brackets, bold or boxed, and the choice's text may follow it, but no second letter: who names
# them all has not chosen. Repetitions are bounded, so that no text takes long.
MARK = r"(?:(?i:answer)(?:\s{1,9}is)?|####|\\boxed(?=\{))"
DECORATION = r"[\s:*_(\[{$\"'`]{0,20}"
CLOSED = r"[)\]}*_$\"'`]{0,9}"
END = rf"{CLOSED}(?:\s*$|[ \t]*\n|[.:)]{{1,2}}{CLOSED}(?=\s|$)(?!\s*[*_(\[]{{0,9}}[A-Z](?:[.,:;)*\]]|$)))"
CHOICE = re.compile(rf"{MARK}{DECORATION}([A-Z])(?![A-Za-z'])({END})?")
ALONE = re.compile(r"\s*[(*]*([A-Z])[)*.]*\s*")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float | str]:
    """1 where the response chooses the letter `ground_truth` (A, B, ...), else 0; `format` says if it chose at all.

    The choice is the last `Answer: B` (also `answer is (B)`, `#### B`, `\\boxed{B}`, each with the text of the choice
    after it or without), or the whole response where that is one letter.
    """
    choice = extract_choice(solution_str)
    correct = float(choice is not None and choice == ground_truth.strip().upper())
    return {"score": correct, "acc": correct, "format": float(choice is not None), "pred": choice or ""}


def extract_choice(text: str) -> str | None:
    """The letter that a response chooses, or None."""
    last = max(CHOICE.finditer(text), key=re.Match.start, default=None)
    if last is not None:
        return last.group(1) if last.group(2) is not None else None
    alone = ALONE.fullmatch(text)
    return alone.group(1) if alone else None
