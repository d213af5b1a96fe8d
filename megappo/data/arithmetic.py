"""Arithmetic questions made on the spot, as parquet files in verl's columns."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq


class Question(NamedTuple):
    text: str
    answer: int


NAMES = ("Ada", "Ben", "Chloe", "Dev", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jun", "Kofi", "Lena")
THINGS = ("apples", "books", "coins", "marbles", "pencils", "shells", "stamps", "stickers")

# Each takes two or three numbers of 2 and up and yields a story with another text for every choice of them. Where
# something is given away, the numbers shown are sums, so that no answer is negative.
Story = Callable[..., Question]
STORIES: tuple[tuple[int, Story], ...] = (
    (2, lambda n, t, a, b: Question(f"{n} has {a} {t} and finds {b} more. How many {t} does {n} have now?", a + b)),
    (2, lambda n, t, a, b: Question(f"{n} had {a + b} {t} and gave away {b}. How many {t} are left?", a)),
    (2, lambda n, t, a, b: Question(f"{n} fills {a} boxes with {b} {t} each. How many {t} is that in all?", a * b)),
    (
        3,
        lambda n, t, a, b, c: Question(
            f"{n} has {a + c} {t}, buys {b} more and then loses {c}. How many {t} does {n} have now?", a + b
        ),
    ),
    (
        3,
        lambda n, t, a, b, c: Question(
            f"{n} buys {a} bags of {b} {t} and already had {c}. How many {t} does {n} have altogether?", a * b + c
        ),
    ),
    (
        3,
        lambda n, t, a, b, c: Question(
            f"{n} shares {a * b} {t} equally among {a} friends. One friend already had {c} {t}. "
            f"How many {t} does that friend have now?",
            b + c,
        ),
    ),
)
CHAT_INSTRUCTION = "Answer with the number only."
STORY_INSTRUCTION = 'Think step by step, then give the answer after "####", as in "#### 12".'


def write_arithmetic(
    out_dir: str | Path,
    *,
    train: int = 2000,
    validation: int = 200,
    digits: int = 2,
    operations: str | None = None,
    seed: int = 0,
    chat: bool = False,
    word_problems: bool = False,
) -> list[Path]:
    """Write `train.parquet` and `validation.parquet`, which share no question, and return their paths.

    By default a prompt is a plain string such as `12+34=` with ground truth `46`, for `megappo.rewards.arithmetic`.

    Args:
        digits: digits of every operand (1 allows 0 to 9, 2 allows 10 to 99, ...); in a word problem, the most digits.
        operations: any of `+`, `-` and `*` (`+` unless given); differences are never negative. Not for word problems,
            which mix operations of their own.
        chat: write chat messages ("What is 12 + 34? ...") instead of plain strings.
        word_problems: chat messages with one- and two-step word problems, whose answer is to follow `####`: their
            reward is `megappo.rewards.gsm8k`, and their data_source `arithmetic_word_problems`.

    Raises:
        ValueError: an impossible option, or more questions asked for than there are distinct ones.
    """
    if train < 1 or validation < 1:
        raise ValueError(f"--train: {train}, --validation: {validation}: give at least 1 each")
    if not 1 <= digits <= 9:
        raise ValueError(f"--digits: {digits}: give a number from 1 to 9")
    if word_problems and (chat or operations is not None):
        given = "--chat" if chat else f"--operations {operations}"
        raise ValueError(f"{given}: word problems are chat messages with operations of their own: leave it out")
    operations = "+" if operations is None else operations
    if not operations or set(operations) - set("+-*"):
        raise ValueError(f"--operations: {operations!r}: give any of +, - and *, for instance '+-'")
    rng = random.Random(seed)
    wanted = train + validation
    questions = _stories(rng, wanted, digits) if word_problems else _expressions(rng, wanted, digits, operations)

    def row(question: Question, split: str, index: int) -> dict[str, object]:
        prompt: object = question.text
        if word_problems:
            prompt = [{"role": "user", "content": f"{question.text} {STORY_INSTRUCTION}"}]
        elif chat:
            prompt = [{"role": "user", "content": f"What is {_spaced(question.text)}? {CHAT_INSTRUCTION}"}]
        return {
            "data_source": "arithmetic_word_problems" if word_problems else "arithmetic",
            "prompt": prompt,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(question.answer)},
            "extra_info": {"split": split, "index": index, "question": question.text},
        }

    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for split, part in (("train", questions[:train]), ("validation", questions[train:])):
        path = out / f"{split}.parquet"
        pq.write_table(pa.Table.from_pylist([row(q, split, i) for i, q in enumerate(part)]), path)
        paths.append(path)
    return paths


def _expressions(rng: random.Random, wanted: int, digits: int, operations: str) -> list[Question]:
    """Distinct questions, each equally likely: they are numbered, so that none has to be listed to sample them."""
    low = 10 ** (digits - 1) if digits > 1 else 0
    span = 10**digits - low
    sizes = {op: span * (span + 1) // 2 if op == "-" else span * span for op in operations}
    _check_enough(wanted, sum(sizes.values()))

    def question(op: str, index: int) -> Question:
        if op == "-":  # the index-th pair with a >= b: row a of a triangle holds a + 1 of them
            a = (math.isqrt(8 * index + 1) - 1) // 2
            b = index - a * (a + 1) // 2
        else:
            a, b = divmod(index, span)
        a, b = a + low, b + low
        return Question(f"{a}{op}{b}=", {"+": a + b, "-": a - b, "*": a * b}[op])

    questions = []
    for index in rng.sample(range(sum(sizes.values())), wanted):
        for op, size in sizes.items():
            if index < size:
                questions.append(question(op, index))
                break
            index -= size
    return questions


def _stories(rng: random.Random, wanted: int, digits: int) -> list[Question]:
    """Distinct word problems, each kind as likely as the others while it has any left."""
    numbers = range(2, 10**digits)
    _check_enough(wanted, sum(len(NAMES) * len(THINGS) * len(numbers) ** count for count, _ in STORIES))
    questions: dict[Question, None] = {}  # a set that keeps its order
    while len(questions) < wanted:
        count, story = rng.choice(STORIES)
        question = story(rng.choice(NAMES), rng.choice(THINGS), *(rng.choice(numbers) for _ in range(count)))
        questions[question] = None
    return list(questions)


def _check_enough(wanted: int, existing: int) -> None:
    if wanted > existing:
        raise ValueError(
            f"{wanted:,} distinct questions wanted (train and validation together), but only {existing:,} exist; "
            "ask for fewer, or for more digits or operations"
        )


def _spaced(expression: str) -> str:
    """`12+34=` as `12 + 34`."""
    for op in "+-*":
        expression = expression.replace(op, f" {op} ")
    return expression.removesuffix("=")
