r"""Reward for MATH problems: the last `\boxed{...}`, compared after normalisation.

The rules follow what is published about the data set's evaluation (Hendrycks et al., "Measuring Mathematical Problem
Solving With the MATH Dataset", 2021, and appendix D of Lewkowycz et al., "Solving Quantitative Reasoning Problems with
Language Models", 2022): spelling is levelled, and no algebra is done, so `x+1` and `1+x` differ. On top of that, plain
numbers and fractions are compared by value.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from megappo.data.marked_answers import last_boxed

NUMBER = re.compile(r"[-+]?[0-9]+(?:\.[0-9]+)?")
FRACTION = re.compile(r"([-+]?)\\frac\{([-+]?[0-9]+)\}\{([-+]?[0-9]+)\}")
MAX_NUMBER = 1000  # characters: Python refuses to parse integers of thousands of digits

UNITS = (
    "degrees?|cm|mm|km|meters?|metres?|centimeters?|kilometers?|feet|foot|ft|inch(?:es)?|yards?|miles?|mph|"
    "seconds?|minutes?|hours?|days?|weeks?|months?|years?|dollars?|cents?|units?|square|cubic|"
    "grams?|kg|kilograms?|pounds?|lbs?|liters?|litres?|gallons?|percent|points?"
)
TEXT_UNITS = rf"(?:{UNITS}|m|in|g|s|sq)"  # in \text only: a bare m may well be a variable
COMMAND = r"\\(?:text|mathrm|mbox|textrm|textbf|mathbf)"


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float | str]:
    r"""1 where the last `\boxed{...}` of the response is equivalent to `ground_truth`, else 0.

    `ground_truth` is the answer, or a whole solution with the answer boxed. `format` says if there was a box at all.
    """
    answer = last_boxed(solution_str)
    truth = last_boxed(ground_truth)
    correct = float(answer is not None and equivalent(answer, ground_truth if truth is None else truth))
    pred = "" if answer is None else normalise(answer)
    return {"score": correct, "acc": correct, "format": float(answer is not None), "pred": pred}


def equivalent(left: str, right: str) -> bool:
    """Whether two answers are the same after normalisation, as strings or as numbers."""
    left, right = normalise(left), normalise(right)
    if left == right:
        return True
    left_value, right_value = _value(left), _value(right)
    return left_value is not None and left_value == right_value


def normalise(answer: str) -> str:
    r"""One spelling for answers that mean the same: `\dfrac12`, `\frac{1}{2}` and `1/2`; `5\text{ cm}` and `5`."""
    text = answer.replace("\n", "").replace("\\\\", "\\")
    text = re.sub(r"\\[!,;:]|\\ |\\q?quad|~|\\(?:left|right)(?![a-z])", "", text)
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    text = re.sub(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|°", "", text)
    text = text.replace(r"\$", "").replace("$", "").replace(r"\%", "").replace("%", "")
    text = re.sub(rf"(?<=[0-9}}])\s*{COMMAND}\{{\s*{TEXT_UNITS}\b[^{{}}]*\}}.*$", "", text)
    text = re.sub(rf"{COMMAND}\{{([^{{}}]*)\}}", r"\1", text)
    text = re.sub(rf"(?<=[0-9}}])\s*(?:{UNITS})(?:\s*(?:{UNITS}))*\.?(?:\^\{{?[23]\}}?)?\s*$", "", text)
    text = re.sub(r"^\s*[A-Za-z]{1,2}\s*=", "", text)  # "x = 5", but not an equation such as "2x = y"
    text = re.sub(r"\s", "", text).rstrip(".")
    if re.fullmatch(r"[-+]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?", text):
        text = text.replace(",", "")
    text = re.sub(r"\\sqrt([0-9A-Za-z])", r"\\sqrt{\1}", text)
    text = re.sub(r"\\frac([0-9A-Za-z])", r"\\frac{\1}", text)
    text = re.sub(r"(\\frac\{(?:[^{}]|\{[^{}]*\})*\})([0-9A-Za-z])", r"\1{\2}", text)
    text = re.sub(r"^([-+]?[0-9]+)/([0-9]+)$", r"\\frac{\1}{\2}", text)
    text = re.sub(r"(?<![0-9])\.(?=[0-9])", "0.", text)
    text = re.sub(r"(?<![0-9.])0+(?=[0-9])", "", text)
    return text


def _value(text: str) -> Fraction | None:
    """The value of a normalised plain number or fraction of integers; None for anything else."""
    if len(text) > MAX_NUMBER:
        return None
    if NUMBER.fullmatch(text):
        return Fraction(text)
    fraction = FRACTION.fullmatch(text)
    if fraction is None or int(fraction.group(3)) == 0:
        return None
    sign, numerator, denominator = fraction.groups()
    return Fraction(int(numerator), int(denominator)) * (-1 if sign == "-" else 1)
