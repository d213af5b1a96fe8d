"""RUN/report.html: one page that shows a whole run, with everything it needs inside it.

It is made from what the run left (config.yaml, versions.json, log.jsonl, samples.jsonl) and can be made at any time: of
a run that has just begun, of one that died, of a log in which metrics are missing.
"""

from __future__ import annotations

import html
import math
import os
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megappo.report.charts import number
from megappo.report.console import duration, validation_scores
from megappo.report.curves import curves
from megappo.report.generations import generations
from megappo.report.parts import Log, nothing, seconds_of, section, values_of
from megappo.report.roles import describe_roles
from megappo.report.run_log import read_log, read_samples
from megappo.report.times import times
from megappo.report.versions import read_versions
from megappo.strict_yaml import parse

STYLE = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
REPORT_NAME = "report.html"


def write_report(run_dir: str | Path, *, refresh_s: int | None = None) -> Path:
    """Writes RUN/report.html and returns its path. refresh_s: the open page loads itself anew this often (seconds).

    Raises FileNotFoundError if `run_dir` is not a folder, ValueError if log.jsonl holds something else than a log.
    """
    run = Path(run_dir)
    if not run.is_dir():
        raise FileNotFoundError(f"{run}: no such run folder; name the folder that run.dir of the config names")
    path = run / REPORT_NAME
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # a run and its watcher may write at the same time
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
        section("facts", "At a glance", _facts(log, config)),
        section("roles", "Roles", _roles(config)),
        section("curves", "Curves", curves(log)),
        section("time", "Where the time goes", times(log)),
        section("samples", "Sampled generations", generations(read_samples(run))),
        section("config", "Configuration and versions", _config(config_text, read_versions(run))),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark">{refresh}<title>{name}: megappo run</title>'
        f"<style>{STYLE}</style></head>\n<body><main>\n" + "\n".join(sections) + "\n</main></body></html>\n"
    )


def _parse(text: str) -> Mapping[str, Any]:
    config = parse(text, [])
    return config if isinstance(config, dict) else {}


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
        facts.append(("wall time", duration(seconds_of(log))))
    step_times = [value for _, value in values_of(log, "timing_s/step") if math.isfinite(value)]
    if step_times:
        facts.append(("a step", f"{number(statistics.median(step_times))} s <small>median</small>"))
    tokens = sum(value for _, value in values_of(log, "perf/total_num_tokens") if math.isfinite(value))
    if tokens:
        facts.append(("tokens", f"{tokens / 1e6:.3g} M" if tokens >= 1e6 else number(tokens)))
    if wanted and step_times and done < wanted:
        facts.append(
            ("left", f"{duration(statistics.median(step_times) * (wanted - done))} <small>at this pace</small>")
        )
    listed = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
    return f'<dl class="facts">{listed}</dl>{_warnings(log)}'


def _warnings(log: Log) -> str:
    """What a person should look at first."""
    if not log:
        return nothing("The log is empty: no step is finished yet.")
    out = []
    bad = [int(row["step"]) for row in log if any(not math.isfinite(value) for value in row["metrics"].values())]
    if bad:
        shown = ", ".join(map(str, bad[:8])) + (" ..." if len(bad) > 8 else "")
        out.append(f"Metrics that are not finite numbers at step {shown}.")
    last = log[-1]["metrics"]
    for name, value in last.items():
        if name.startswith("guard/") and not name.endswith("_factor") and value > 0:
            guard = html.escape(name.removeprefix("guard/"))
            out.append(f"The guard {guard} is beyond its limit since {value:g} step{'' if value == 1 else 's'}.")
    failed = sum(value for _, value in values_of(log, "reward/failed_rows") if math.isfinite(value))
    if failed:
        out.append(f"{failed:g} rewards failed and counted as 0.")
    return "".join(f'<p class="warning">{text}</p>' for text in out)


def _roles(config: Mapping[str, Any]) -> str:
    alone = {"pools": config.get("pools"), "roles": {"model": config.get("role")}}  # of sft and reward-train
    rows = describe_roles(alone if "role" in config else config)
    if not rows:
        return nothing("No config.yaml in this run folder.")
    body = "".join(
        f"<tr><th>{html.escape(row.role)}</th><td>{html.escape(row.pool)}</td><td>{row.devices or '&ndash;'}</td>"
        f"<td>{html.escape(row.layout)}</td></tr>"
        for row in rows
    )
    head = "<tr><th>role</th><th>pool</th><th>devices</th><th>layout</th></tr>"
    return f'<div class="card scroll"><table>{head}{body}</table></div>'


def _config(text: str, versions: Mapping[str, str]) -> str:
    if not text:
        return nothing("No config.yaml in this run folder.")
    ran = ", ".join(f"{html.escape(name)} {html.escape(version)}" for name, version in versions.items())
    config = f"<details><summary>config.yaml, as the run used it</summary><pre>{html.escape(text)}</pre></details>"
    return (f'<p class="card">{ran}</p>' if ran else "") + config
