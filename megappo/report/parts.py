"""Pieces of HTML that every section of the report is made of, and how it reads the log."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Log = Sequence[Mapping[str, Any]]
"""The objects of log.jsonl."""


def section(key: str, title: str, body: str) -> str:
    return f'<section id="{key}"><h2>{title}</h2>{body}</section>'


def nothing(text: str) -> str:
    """What stands where there is nothing to show."""
    return f'<p class="nodata">{text}</p>'


def card(title: str, body: str, hint: str = "") -> str:
    note = f"<small>{hint}</small>" if hint else ""
    return f'<figure class="card"><figcaption>{title} {note}</figcaption>{body}</figure>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts, with HTML in its cells; on a phone its rows are stacked, and each cell says what it is."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f'<td data-label="{name}">{cell}</td>' for name, cell in zip(head, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="card"><table class="samples"><tr>{top}</tr>{body}</table></div>'


def values_of(log: Log, metric: str) -> list[tuple[float, float]]:
    """(step, value) wherever it was logged."""
    return [(row["step"], row["metrics"][metric]) for row in log if metric in row["metrics"]]


def seconds_of(log: Log) -> float:
    """Time in steps, validations and checkpoints: the pauses of a run that was stopped and resumed do not count."""
    own = ("timing_s/step", "timing_s/testing", "timing_s/save_checkpoint")
    values = (row["metrics"].get(name, 0.0) for row in log for name in own)
    return math.fsum(filter(math.isfinite, values))
