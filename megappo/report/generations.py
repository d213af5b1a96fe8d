"""The report's sampled generations: the best and the worst of a step side by side over time, and validation prompts at
their first and last step."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from megappo.report.charts import number
from megappo.report.parts import nothing, table

Samples = Sequence[Mapping[str, Any]]
TABLE_ROWS = 12
MOST_STEPS = 8
"""Whose best and worst are shown."""


def generations(samples: Samples) -> str:
    """What samples.jsonl holds."""
    if not samples:
        return nothing("No samples were logged.")
    of_kind: dict[str, list[Mapping[str, Any]]] = {}
    for row in samples:
        of_kind.setdefault(str(row.get("kind", "train")), []).append(row)
    out = []
    if train := of_kind.get("train"):
        out.append(f"<h3>Best and worst <small>of each step's logged responses</small></h3>{best_and_worst(train)}")
    for kind in ("validation", "canary"):
        if rows := of_kind.get(kind):
            out.append(f"<h3>{kind.capitalize()} <small>the same prompts</small></h3>{first_and_last(rows)}")
    return "".join(out)


def best_and_worst(samples: Samples) -> str:
    """Of some steps spread over the run, the responses of highest and lowest score."""
    steps = spread(sorted({row.get("step", 0) for row in samples}), MOST_STEPS)
    out = []
    for step in steps:
        rows = [row for row in samples if row.get("step", 0) == step]
        scored = [row for row in rows if isinstance(row.get("score"), (int, float)) and math.isfinite(row["score"])]
        if not scored:
            cells = [_sample("no score", rows[0])]
        else:
            best, worst = max(scored, key=lambda row: row["score"]), min(scored, key=lambda row: row["score"])
            same = best["score"] == worst["score"]
            cells = [_sample("all the same", best)] if same else [_sample("best", best), _sample("worst", worst)]
        out.append(f'<div class="pair"><h4>step {step}</h4>{"".join(cells)}</div>')
    return "".join(out)


def spread(steps: Sequence[int], most: int) -> list[int]:
    """At most ``most`` of them, evenly over the sequence, the first and the last included."""
    if len(steps) <= most:
        return list(steps)
    return [steps[round(index * (len(steps) - 1) / (most - 1))] for index in range(most)]


def _sample(label: str, row: Mapping[str, Any]) -> str:
    truth = row.get("ground_truth")
    expected = f" <small>expected {_text(truth, 80)}</small>" if truth not in (None, "") else ""
    prompt = f"<details><summary>prompt</summary>{_text(row.get('prompt'), 2000)}</details>"
    return (
        f'<div class="card samples"><p>{_badge(row)}<b>{label}</b>{expected}</p>'
        f"{_text(row.get('response'), 600)}{prompt}</div>"
    )


def first_and_last(samples: Samples) -> str:
    """The same prompts at the first and the last step, in two columns."""
    steps = sorted({row.get("step", 0) for row in samples})
    first = {str(row.get("prompt")): row for row in reversed(samples) if row.get("step", 0) == steps[0]}
    last = {str(row.get("prompt")): row for row in reversed(samples) if row.get("step", 0) == steps[-1]}
    if len(steps) == 1:
        head = ["prompt", "ground truth", f"response at step {steps[0]}"]
        rows = list(reversed(last.values()))[:TABLE_ROWS]
        return table(head, [[*_asked(row), _response(row)] for row in rows])
    head = ["prompt", "ground truth", f"response at step {steps[0]}", f"response at step {steps[-1]}"]
    prompts = list(dict.fromkeys([*reversed(last), *reversed(first)]))
    prompts.sort(key=lambda prompt: (prompt not in first) + (prompt not in last))  # those in both come first
    cells = []
    for prompt in prompts[:TABLE_ROWS]:
        pair = [_response(rows[prompt]) if prompt in rows else "" for rows in (first, last)]
        cells.append([*_asked(last.get(prompt) or first[prompt]), *pair])
    return table(head, cells)


def _asked(row: Mapping[str, Any]) -> list[str]:
    return [_text(row.get("prompt"), 600), _text(row.get("ground_truth"), 600)]


def _response(row: Mapping[str, Any]) -> str:
    return f"{_badge(row)}{_text(row.get('response'), 600)}"


def _badge(row: Mapping[str, Any]) -> str:
    score = row.get("score")
    if not isinstance(score, (int, float)):
        return ""
    return f'<b class="score {"good" if score > 0 else "bad"}">{number(score)}</b> '


def _text(value: Any, most: int) -> str:
    text = "" if value is None else str(value)
    if len(text) > most:
        text = text[:most] + " ..."
    return f"<code>{html.escape(text)}</code>" if text else '<span class="nodata">(empty)</span>'
