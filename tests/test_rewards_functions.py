from __future__ import annotations

import time

import pytest

from megappo.data.marked_answers import last_boxed
from megappo.rewards import arithmetic, gsm8k, math, multiple_choice

# The form of the GSM8K data set's own answers.
GSM8K_SOLUTION = "She sold 48/2 = <<48/2=24>>24 clips in May.\nAltogether 48+24 = <<48+24=72>>72 clips.\n#### 72"


@pytest.mark.parametrize(
    ("response", "truth", "right"),
    [
        ("46", "46", True),
        (" \n46", "46", True),
        ("46 and so on", "46", True),
        ("46\n12+34=46", "46", True),
        ("046", "46", True),
        ("+46", "46", True),
        ("-7", "-7", True),
        ("-0", "0", True),
        ("0", "0", True),
        ("7", "-7", False),
        ("4", "46", False),
        ("461", "46", False),
        ("46.5", "46", False),
        ("46,000", "46", False),
        ("It is 46", "46", False),
        ("", "46", False),
        ("-", "46", False),
        ("9" * 10000, "46", False),  # more digits than int() takes
    ],
)
def test_arithmetic(response: str, truth: str, right: bool) -> None:
    result = arithmetic.compute_score("arithmetic", response, truth, None)
    assert (result["score"], result["acc"]) == (right, right)


@pytest.mark.parametrize(
    ("response", "truth", "right"),
    [
        (GSM8K_SOLUTION, "72", True),
        ("#### 72", GSM8K_SOLUTION, True),
        ("####72.", "72", True),
        ("#### 72.00", "72", True),
        ("#### $1,234.50", "1234.5", True),
        ("#### 1,000,000", "1000000", True),
        ("#### -5", "-5", True),
        ("#### -$5", "-5", True),
        ("#### .5", "0.5", True),
        ("#### 72 clips", "72", True),
        ("#### 71\nNo:\n#### 72", "72", True),
        ("#### 72", "1,072", False),
        ("#### 5", "-5", False),
        ("#### 1/2", "1", False),
        ("#### seventy-two", "72", False),
        ("#### 71", "72", False),
        ("The answer is 72.", "72", False),
        ("", "72", False),
        ("#### 72", "no number", False),
    ],
)
def test_gsm8k_strict(response: str, truth: str, right: bool) -> None:
    result = gsm8k.compute_score("openai/gsm8k", response, truth, {})
    assert (result["score"], result["acc"]) == (right, right)


@pytest.mark.parametrize(
    ("response", "truth", "right"),
    [
        ("The answer is 72.", "72", True),
        ("So she pays $1,234.50.", "1234.5", True),
        ("x = -4", "-4", True),
        ("It is 10-3=7", "7", True),
        ("the years 2010-2012", "2012", True),
        ("First 72, then 24", "72", False),
        ("#### 72 for her 3 friends", "72", True),  # the marked number wins over the last one
        ("none", "72", False),
    ],
)
def test_gsm8k_flexible(response: str, truth: str, right: bool) -> None:
    result = gsm8k.compute_score_flexible("openai/gsm8k", response, truth)
    assert result["score"] == right
    assert result["format"] == ("####" in response)
    assert result == gsm8k.compute_score("openai/gsm8k", response, truth, None, method="flexible")


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so $\boxed{5}$.", "5"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\sqrt{\frac{a}{b}}} or }", r"\sqrt{\frac{a}{b}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{x\right.}", r"\left\{x\right."),
        (r"$\boxed 7$", "7"),
        (r"\fbox{3}", "3"),
        (r"\boxed {4}", "4"),
        (r"\boxed{unfinished", None),
        (r"\boxed", None),
        ("5", None),
    ],
)
def test_math_takes_the_last_box(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (r"\dfrac12", "1/2"),
        (r"\tfrac{1}{2}", "0.5"),
        (r"\frac{1}2", ".50"),
        (r"\frac{\sqrt{3}}2", r"\frac{\sqrt3}{2}"),
        (r"-\frac{3}{4}", r"\frac{-3}{4}"),
        (r"\frac{2}{4}", r"\frac{1}{2}"),
        ("1,234,567", "1234567"),
        ("007", "7"),
        ("2.0", "2"),
        ("5.", "5"),
        (r"90^\circ", "90"),
        (r"90^{\circ}", r"90\text{ degrees}"),
        (r"5\text{ cm}", "5"),
        (r"5 \text{ m}^2", "5"),
        (r"12\mbox{ inches}", "12 inches"),
        ("12 square feet", "12"),
        (r"50\%", "50"),
        (r"\$3.50", "3.5"),
        (r"x = 5", "5"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"\text{(B)}", "(B)"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
        (r"10,\!000", "10000"),
        (r"x^2 + 2x", r"x^2+2x"),
        ("1 \\\\ 2", "1 \\ 2"),
    ],
)
def test_math_spellings_of_one_answer(left: str, right: str) -> None:
    assert math.equivalent(left, right)
    assert math.equivalent(right, left)
    result = math.compute_score("MATH", rf"Hence $\boxed{{{left}}}$.", rf"Solution: $\boxed{{{right}}}$")
    assert result.items() >= {"score": 1.0, "acc": 1.0, "format": 1.0}.items()


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (r"\frac{1}{2}", r"\frac{2}{1}"),
        ("5", "-5"),
        ("1,2", "12"),
        ("(1,2)", "(2,1)"),
        ("2m", "2"),  # a variable, not metres
        ("x^{10}", "x^{1}"),
        ("105", "15"),
        ("1.05", "1.5"),
        ("[0,1]", "(0,1)"),
        (r"\frac{1}{0}", "1"),
        (r"\text{Evelyn}", r"\text{Briana}"),
        (r"\sqrt{2}", "2"),
        ("9" * 5000, "8" * 5000),  # more digits than int() takes
        ("", "0"),
    ],
)
def test_math_other_answers(left: str, right: str) -> None:
    assert not math.equivalent(left, right)


def test_math_without_a_box_scores_nothing() -> None:
    assert math.compute_score("MATH", "5", "5") == {"score": 0.0, "acc": 0.0, "format": 0.0, "pred": ""}


@pytest.mark.parametrize(
    "hostile", ["\\boxed{" * 3000, "\\text{" + " " * 20000, "1" * 20000, "1," * 10000, "\\frac{" * 5000]
)
def test_hostile_responses_are_quick(hostile: str) -> None:
    start = time.process_time()
    for module in (arithmetic, gsm8k, math):
        module.compute_score("s", hostile, "5")
        module.compute_score("s", rf"\boxed{{{hostile}}} #### {hostile}/2", "5")
    gsm8k.compute_score_flexible("s", hostile, "5")
    assert time.process_time() - start < 2  # milliseconds; a pattern that backtracks without bounds takes minutes


def test_equal_answers_vote_alike() -> None:
    """`pred`, by which majorities are found, is one spelling for all of an answer's."""
    for module, texts, pred in (
        (gsm8k, ("#### 1,072.00", "#### $1072", "so #### +1072"), "1072"),
        (gsm8k, ("#### -0.50", "#### -.5"), "-0.5"),
        (gsm8k, ("72", ""), ""),
        (math, (r"\boxed{\dfrac12}", r"\boxed{1/2}", r"\boxed{\frac{1}{2}}"), r"\frac{1}{2}"),
        (arithmetic, ("7", " +07 apples"), "7"),
        (multiple_choice, ("Answer: B", "the answer is (B)", r"\boxed{B}"), "B"),
    ):
        assert {module.compute_score("s", text, "5")["pred"] for text in texts} == {pred}
