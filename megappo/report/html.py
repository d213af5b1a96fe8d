"""RUN/report.html: one page that shows a whole run, with everything it needs inside it.

It is made from what the run left (config.yaml, log.jsonl, samples.jsonl) and can be made at any time: of a run that
has just begun, of one that died, of a log in which metrics are missing.
"""

from __future__ import annotations

import html
import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megappo.report.charts import COLORS, Series, line_chart, number, stacked_bars
from megappo.report.console import duration, validation_scores
from megappo.report.figures import CHARTS, PHASES
from megappo.report.roles import describe_roles
from megappo.report.run_log import read_log, read_samples

Log = Sequence[Mapping[str, Any]]
STYLE = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
REPORT_NAME = "report.html"
SAMPLE_ROWS = 12


def write_report(run_dir: str | Path, *, refresh_s: int | None = None) -> Path:
    """Writes RUN/report.html and returns its path. refresh_s: the open page loads itself anew this often (seconds).

    Raises FileNotFoundError if `run_dir` is not a folder, ValueError if log.jsonl holds something else than a log.
    """
    run = Path(run_dir)
    if not run.is_dir():
        raise FileNotFoundError(f"{run}: no such run folder; name the folder that run.dir of the config names")
    path = run / REPORT_NAME
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(render(run, refresh_s), encoding="utf-8", errors="backslashreplace")
    os.replace(temporary, path)  # a browser never sees half a page
    return path


def render(run: Path, refresh_s: int | None = None) -> str:
    """The page as text."""
    config_path = run / "config.yaml"
    config_text = config_path.read_text(encoding="utf-8") if config_path.is_file() else ""
    config = _parse(config_text)
    log = read_log(run)
    name = html.escape(run.resolve().name)
    refresh = f'<meta http-equiv="refresh" content="{refresh_s}">' if refresh_s else ""
    sections = [
        f"<header><h1>{name}</h1><p>{_subtitle(log, config)}</p></header>",
        _section("facts", "At a glance", _facts(log, config)),
        _section("roles", "Roles", _roles(config)),
        _section("curves", "Curves", _curves(log)),
        _section("time", "Where the time goes", _times(log)),
        _section("samples", "Sampled generations", _samples(read_samples(run))),
        _section("config", "Config", _config(config_text)),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark">{refresh}<title>{name}: megappo run</title>'
        f"<style>{STYLE}</style></head>\n<body><main>\n" + "\n".join(sections) + "\n</main></body></html>\n"
    )


def _section(key: str, title: str, body: str) -> str:
    return f'<section id="{key}"><h2>{title}</h2>{body}</section>'


def _nothing(text: str) -> str:
    return f'<p class="nodata">{text}</p>'


def _parse(text: str) -> Mapping[str, Any]:
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return config if isinstance(config, dict) else {}


def _values(log: Log, metric: str) -> list[tuple[float, float]]:
    return [(row["step"], row["metrics"][metric]) for row in log if metric in row["metrics"]]


def _validations(log: Log) -> dict[str, list[tuple[float, float]]]:
    """Name of a main validation metric -> its points."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in log:
        for name, value in validation_scores(row["metrics"]).items():
            points.setdefault(name, []).append((row["step"], value))
    return points


def _subtitle(log: Log, config: Mapping[str, Any]) -> str:
    parts = []
    if config.get("model"):
        parts.append(f"model {html.escape(str(config['model']))}")
    if log:
        parts.append("last line of the log " + time.strftime("%Y-%m-%d %H:%M", time.localtime(log[-1]["time"])))
    return " &middot; ".join(parts)


def _facts(log: Log, config: Mapping[str, Any]) -> str:
    run = config.get("run")
    wanted = run.get("steps") if isinstance(run, dict) else None
    done = log[-1]["step"] if log else 0
    facts = [("steps", f"{done} <small>of {wanted}</small>" if wanted else str(done))]
    for name, points in _validations(log).items():
        first, last = points[0][1], points[-1][1]
        change = f" <small>({last - first:+.3f})</small>" if len(points) > 1 else ""
        text = f"{first:.3f} &rarr; {last:.3f}{change}" if len(points) > 1 else f"{first:.3f}"
        facts.append((f"validation, {html.escape(name)}", text))
    if len(log) > 1:
        facts.append(("wall time", duration(log[-1]["time"] - log[0]["time"])))
    step_times = [value for _, value in _values(log, "timing_s/step") if math.isfinite(value)]
    if step_times:
        facts.append(("a step", f"{number(statistics.median(step_times))} s <small>median</small>"))
    tokens = sum(value for _, value in _values(log, "perf/total_num_tokens") if math.isfinite(value))
    if tokens:
        facts.append(("tokens", f"{tokens / 1e6:.3g} M" if tokens >= 1e6 else number(tokens)))
    bad = [int(row["step"]) for row in log if any(not math.isfinite(value) for value in row["metrics"].values())]
    warning = ""
    if bad:
        shown = ", ".join(map(str, bad[:8])) + (" ..." if len(bad) > 8 else "")
        warning = f'<p class="warning">Metrics that are not finite numbers at step {shown}.</p>'
    if not log:
        warning = _nothing("The log is empty: no step is finished yet.")
    return '<dl class="facts">' + "".join(f"<div><dt>{k}</dt><dd>{v}</dd></div>" for k, v in facts) + "</dl>" + warning


def _roles(config: Mapping[str, Any]) -> str:
    rows = describe_roles(config)
    if not rows:
        return _nothing("No config.yaml in this run folder.")
    body = "".join(
        f"<tr><th>{html.escape(row.role)}</th><td>{html.escape(row.pool)}</td><td>{row.devices or '&ndash;'}</td>"
        f"<td>{html.escape(row.layout)}</td></tr>"
        for row in rows
    )
    head = "<tr><th>role</th><th>pool</th><th>devices</th><th>layout</th></tr>"
    return f'<div class="card scroll"><table>{head}{body}</table></div>'


def _curves(log: Log) -> str:
    validation = [Series(name, points) for name, points in _validations(log).items()]
    cards = [_card("Validation", line_chart(validation, label="Validation"), "score on the validation data")]
    for chart in CHARTS:
        lines = [Series(name, _values(log, metric)) for metric, name in chart.metrics.items()]
        lines = [line for line in lines if line.points]
        if lines:
            svg = line_chart(lines, label=chart.title, y_range=chart.y_range)
            cards.append(_card(chart.title, svg, chart.hint))
    return f'<div class="grid">{"".join(cards)}</div>'


def _card(title: str, body: str, hint: str = "") -> str:
    note = f"<small>{hint}</small>" if hint else ""
    return f'<figure class="card"><figcaption>{title} {note}</figcaption>{body}</figure>'


def _times(log: Log) -> str:
    rows = [row for row in log if "timing_s/step" in row["metrics"]]
    if not rows:
        return _nothing("No step is finished yet.")
    parts = {}
    for key, name in PHASES.items():
        values = [row["metrics"].get(f"timing_s/{key}", math.nan) for row in rows]
        if any(math.isfinite(value) and value > 0 for value in values):
            parts[name] = values
    total = [row["metrics"]["timing_s/step"] for row in rows]
    bars = stacked_bars([row["step"] for row in rows], parts, total, label="Seconds of each phase, by step")
    whole = sum(filter(math.isfinite, total))
    predicted = any("perf/predicted_s/step" in row["metrics"] for row in rows)
    more = "<th>predicted</th>" if predicted else ""
    table = [f"<tr><th>phase</th><th>mean</th>{more}<th>of the step</th></tr>"]
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
    note = _overlap_note(rows)
    return (
        f'<div class="grid">{_card("Phases", bars, "seconds, by step")}'
        f'<figure class="card"><figcaption>Mean of a step</figcaption><table class="phases">{"".join(table)}</table>'
        f"<p>{note}</p></figure></div>"
    )


def _predicted(rows: Log, key: str) -> str:
    """What a phase should have taken, where its kind of device is known."""
    values = [row["metrics"].get(f"perf/predicted_s/{key}", math.nan) for row in rows]
    values = [value for value in values if math.isfinite(value)]
    return f"<td>{number(statistics.fmean(values))} s</td>" if values else "<td></td>"


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


def _samples(samples: Sequence[Mapping[str, Any]]) -> str:
    """Validation: the same prompts, first and last. Without any, the last step's training samples."""
    validation = [row for row in samples if row.get("kind") == "validation"]
    if not validation:
        if not samples:
            return _nothing("No samples were logged.")
        last = max(row.get("step", 0) for row in samples)
        rows = [row for row in samples if row.get("step", 0) == last][:SAMPLE_ROWS]
        head = ["prompt", "ground truth", f"response at step {last} <small>(train)</small>"]
        return _sample_table(head, [[_text(r, "prompt"), _text(r, "ground_truth"), _response(r)] for r in rows])
    steps = sorted({row.get("step", 0) for row in validation})
    first = {str(row.get("prompt")): row for row in reversed(validation) if row.get("step", 0) == steps[0]}
    last = {str(row.get("prompt")): row for row in reversed(validation) if row.get("step", 0) == steps[-1]}
    if len(steps) == 1:
        head = ["prompt", "ground truth", f"response at step {steps[0]}"]
        rows = list(reversed(last.values()))[:SAMPLE_ROWS]
        return _sample_table(head, [[_text(r, "prompt"), _text(r, "ground_truth"), _response(r)] for r in rows])
    head = ["prompt", "ground truth", f"response at step {steps[0]}", f"response at step {steps[-1]}"]
    prompts = list(dict.fromkeys([*reversed(last), *reversed(first)]))
    prompts.sort(key=lambda prompt: (prompt not in first) + (prompt not in last))  # those in both come first
    cells = []
    for prompt in prompts[:SAMPLE_ROWS]:
        any_row = last.get(prompt) or first[prompt]
        pair = [_response(rows[prompt]) if prompt in rows else "" for rows in (first, last)]
        cells.append([_text(any_row, "prompt"), _text(any_row, "ground_truth"), *pair])
    return _sample_table(head, cells)


def _sample_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="card scroll"><table class="samples"><tr>{top}</tr>{body}</table></div>'


def _text(row: Mapping[str, Any], key: str, most: int = 600) -> str:
    value = row.get(key)
    text = "" if value is None else str(value)
    if len(text) > most:
        text = text[:most] + " ..."
    return f"<code>{html.escape(text)}</code>" if text else '<span class="nodata">(empty)</span>'


def _response(row: Mapping[str, Any]) -> str:
    score = row.get("score")
    if not isinstance(score, (int, float)):
        return _text(row, "response")
    kind = "good" if score > 0 else "bad"
    return f'<b class="score {kind}">{number(score)}</b> {_text(row, "response")}'


def _config(text: str) -> str:
    if not text:
        return _nothing("No config.yaml in this run folder.")
    return f"<details><summary>config.yaml, as the run used it</summary><pre>{html.escape(text)}</pre></details>"
