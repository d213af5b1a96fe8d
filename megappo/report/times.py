"""The report's section on time: each phase, each pool, and what was predicted."""

from __future__ import annotations

import math
import statistics

from megappo.report.charts import COLORS, Series, line_chart, number, stacked_bars
from megappo.report.figures import PHASES
from megappo.report.parts import Log, card, nothing, values_of
from megappo.report.timeline import busy_timeline

BUSY = "perf/busy_share/"


def times(log: Log) -> str:
    """Phases by step and on average, the pools' timeline, and the predicted step beside the measured."""
    rows = [row for row in log if "timing_s/step" in row["metrics"]]
    if not rows:
        return nothing("No step is finished yet.")
    parts = {}
    for key, name in PHASES.items():
        values = [row["metrics"].get(f"timing_s/{key}", math.nan) for row in rows]
        if any(math.isfinite(value) and value > 0 for value in values):
            parts[name] = values
    total = [row["metrics"]["timing_s/step"] for row in rows]
    steps = [row["step"] for row in rows]
    bars = stacked_bars(steps, parts, total, label="Seconds of each phase, by step")
    cards = [
        card("Phases", bars, "seconds, by step"),
        f'<figure class="card"><figcaption>Mean of a step</figcaption>{_phase_table(rows, parts, total)}'
        f"<p>{_overlap_note(rows)}</p></figure>",
    ]
    if pools := _pools(rows):
        strips = busy_timeline(steps, pools, label="Busy share of each pool, by step")
        cards.append(card("Pools", strips, "share of each step in which a pool was busy"))
    if predicted := values_of(rows, "perf/predicted_s/step"):
        lines = [Series("measured", values_of(rows, "timing_s/step")), Series("predicted", predicted, dashed=True)]
        drawing = line_chart(lines, label="Seconds of a step, measured and predicted", y_range=(0, 0))
        cards.append(card("Step", drawing, "seconds, measured and predicted"))
    return f'<div class="grid">{"".join(cards)}</div>'


def _pools(rows: Log) -> dict[str, list[float]]:
    """Busy shares by pool; last of all, the share in which no worker of any pool was busy."""
    names = sorted({name for row in rows for name in row["metrics"] if name.startswith(BUSY)})
    shares = {name.removeprefix(BUSY): name for name in sorted(names, key=lambda name: name == f"{BUSY}driver")}
    if "driver" in shares:
        shares["driver (rewards)"] = shares.pop("driver")
    if shares:
        shares["nobody"] = "perf/driver_share"
    return {pool: [row["metrics"].get(name, math.nan) for row in rows] for pool, name in shares.items()}


def _phase_table(rows: Log, parts: dict[str, list[float]], total: list[float]) -> str:
    whole = sum(filter(math.isfinite, total))
    predicted = any("perf/predicted_s/step" in row["metrics"] for row in rows)
    more = "<th>predicted</th>" if predicted else ""
    table = [f"<tr><th>phase</th><th>mean</th>{more}<th>share</th></tr>"]
    sums = {name: sum(filter(math.isfinite, values)) for name, values in parts.items()}
    keys = {name: key for key, name in PHASES.items()}
    for index, (name, seconds) in enumerate(sums.items()):
        share = seconds / whole if whole else 0.0
        fill = f"width:{min(1.0, share) * 100:.1f}%;background:var(--c{index % COLORS})"
        table.append(
            f"<tr><td>{name}</td><td>{number(seconds / len(rows))} s</td>"
            f"{_predicted(rows, keys[name]) if predicted else ''}<td><div class=bar>"
            f'<i style="{fill}"></i></div>{share:.0%}</td></tr>'
        )
    last = _predicted(rows, "step") if predicted else ""
    table.append(f"<tr class=sum><td>whole step</td><td>{number(whole / len(rows))} s</td>{last}<td></td></tr>")
    return f'<div class="scroll"><table class="phases">{"".join(table)}</table></div>'


def _predicted(rows: Log, key: str) -> str:
    """What a phase should have taken, where its kind of device is known; steps without the phase count as 0."""
    known = [row["metrics"] for row in rows if "perf/predicted_s/step" in row["metrics"]]
    values = [value for metrics in known if math.isfinite(value := metrics.get(f"perf/predicted_s/{key}", 0.0))]
    return f"<td>{number(statistics.fmean(values))} s</td>" if any(values) else "<td></td>"


def _overlap_note(rows: Log) -> str:
    """How far the phases ran at the same time. Steps that also validate or save do not count, where others exist."""
    extra = ("timing_s/testing", "timing_s/save_checkpoint")
    plain = [row["metrics"] for row in rows if not any(row["metrics"].get(name) for name in extra)]
    steps = plain or [row["metrics"] for row in rows]
    phases = sum(
        value
        for metrics in steps
        for key in PHASES
        if math.isfinite(value := metrics.get(f"timing_s/{key}", 0.0)) and f"timing_s/{key}" not in extra
    )
    whole = sum(value for metrics in steps if math.isfinite(value := metrics["timing_s/step"]))
    saved = (phases - whole) / len(steps)
    if saved > 0.01 * whole / len(steps):
        return (
            f"Running phases at the same time saves {number(saved)} s a step: one after the other they would take"
            f" {number(phases / len(steps))} s. Bars that stand above the line overlapped."
        )
    return f"The phases add up to {phases / whole:.0%} of the step; the rest is spent between them." if whole else ""
