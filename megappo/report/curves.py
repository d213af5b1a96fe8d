"""The report's curves, and the table of everything that was logged."""

from __future__ import annotations

import html
import math

from megappo.report.charts import Series, line_chart, number
from megappo.report.figures import PREDICTED, chart_groups
from megappo.report.parts import Log, card, nothing, values_of


def curves(log: Log) -> str:
    """The charts of all metrics that are there, in groups."""
    out = []
    for title, charts in chart_groups(metric_names(log)).items():
        cards = []
        for chart in charts:
            lines = [
                Series(name, values_of(log, metric), name.endswith(PREDICTED)) for metric, name in chart.metrics.items()
            ]
            if lines := [line for line in lines if line.points]:
                drawing = line_chart(lines, label=chart.title, y_range=chart.y_range)
                cards.append(card(html.escape(chart.title), drawing, chart.hint))
        if cards:
            out.append(f'<h3>{title}</h3><div class="grid">{"".join(cards)}</div>')
    return "".join(out) + every_metric(log) if out else nothing("No step is finished yet.")


def metric_names(log: Log) -> list[str]:
    """All of a log, in order."""
    return sorted({name for row in log for name in row["metrics"]})


def every_metric(log: Log) -> str:
    """A table, folded away, of every metric's first, last, smallest and largest value."""
    head = "".join(f"<th>{name}</th>" for name in ("metric", "first", "last", "smallest", "largest"))
    rows = []
    for name in metric_names(log):
        values = [value for _, value in values_of(log, name)]
        finite = [value for value in values if math.isfinite(value)] or [math.nan]
        cells = "".join(f"<td>{number(v)}</td>" for v in (values[0], values[-1], min(finite), max(finite)))
        rows.append(f"<tr><td><code>{html.escape(name)}</code></td>{cells}</tr>")
    summary = f"<summary>Every metric that was logged: {len(rows)}</summary>"
    table = f'<table class="metrics"><tr>{head}</tr>{"".join(rows)}</table>'
    return f'<details>{summary}<div class="scroll">{table}</div></details>'
