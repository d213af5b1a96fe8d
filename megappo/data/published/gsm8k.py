"""GSM8K (Cobbe et al., "Training Verifiers to Solve Math Word Problems", 2021): question, answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megappo.data.marked_answers import AFTER_HASHES
from megappo.data.published.dataset import Converted, Dataset, Unusable, prompt_schema, question, text


def _convert(row: Mapping[str, Any], instruction: str) -> Converted:
    problem, answer = text(row, "question"), text(row, "answer")
    found = AFTER_HASHES.findall(answer)
    if not found:
        raise Unusable("no number after ####")
    truth = found[-1].replace(",", "").replace("$", "")
    return question("openai/gsm8k", "math", problem, instruction, truth, answer=answer, question=problem)


DATASET = Dataset(
    name="gsm8k",
    required=("question", "answer"),
    schemas={"": prompt_schema()},
    convert=_convert,
    skip=("socratic", "example_model_solutions"),  # the same questions with other answers
)
