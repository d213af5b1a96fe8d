r"""MATH (Hendrycks et al., "Measuring Mathematical Problem Solving With the MATH Dataset", 2021).

As the authors publish it (`train/algebra/1.json`, ...: one problem a file) and as on hubs: problem, solution, level,
type. The answer is what the last `\boxed{...}` of the solution holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from megappo.data.marked_answers import last_boxed
from megappo.data.published.dataset import Converted, Dataset, Unusable, prompt_schema, question, text


def _convert(row: Mapping[str, Any], instruction: str) -> Converted:
    problem, solution = text(row, "problem"), text(row, "solution")
    truth = last_boxed(solution)
    if truth is None or not truth.strip():
        raise Unusable("no \\boxed{} answer in the solution")
    more = {name: None if row[name] is None else str(row[name]) for name in ("level", "type")}
    return question("lighteval/MATH", "math", problem, instruction, truth, answer=solution, question=problem, **more)


DATASET = Dataset(
    name="math",
    required=("problem", "solution"),
    optional=("level", "type"),
    schemas={"": prompt_schema(("level", pa.string()), ("type", pa.string()))},
    convert=_convert,
)
