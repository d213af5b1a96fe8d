"""The report comes out for any log, holds everything inside itself, and its charts are drawn where the values are."""

from __future__ import annotations

import math
import platform
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megappo import __version__
from megappo.report.charts import Series, line_chart, number, stacked_bars, ticks
from megappo.report.figures import chart_groups
from megappo.report.generations import best_and_worst, spread
from megappo.report.html import write_report
from megappo.report.run_log import RunLog
from megappo.report.timeline import busy_timeline
from megappo.report.versions import versions

SECTIONS = {"facts", "roles", "curves", "time", "samples", "config"}
VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Checks that tags nest, and collects section ids, text, addresses and tag names."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: set[str] = set()
        self.tags: set[str] = set()
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            assert name not in ("src", "href", "srcset"), f"<{tag} {name}={value}>"
            if tag == "section" and name == "id":
                self.ids.add(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data


def report(run: Path) -> Page:
    text = write_report(run).read_text(encoding="utf-8")
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text), "an address in a self-contained page"
    page = Page(text)
    assert page.ids == SECTIONS
    assert "script" not in page.tags and "nan" not in re.findall(r"[a-z]+", text.split("</style>")[1].lower())
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)
    return page


def fill(run: Path, steps: int) -> RunLog:
    log = RunLog(run)
    log.append(0, {"val-core/sums/reward/mean@1": 0.43, "timing_s/testing": 0.5})
    for step in range(1, steps + 1):
        metrics = {
            "critic/score/mean": 0.4 + step / 100,
            "actor/pg_loss": -0.01,
            "actor/ppo_kl": math.nan if step == 2 else 0.001,
            "actor/lr": 1e-6,
            "timing_s/gen": 1.0,
            "timing_s/update_actor": 2.0,
            "timing_s/update_critic": 2.0,
            "timing_s/step": 3.5,
        }
        if step == steps:
            metrics["val-core/sums/reward/mean@1"] = 0.75
        log.append(step, metrics)
    return log


def test_whole_run(tmp_path: Path) -> None:
    log = fill(tmp_path / "demo", 5)
    for step in (0, 5):
        rows = [("1+2=", "3", step > 0), ("<script>alert(1)</script>", "&lt;", False)]
        log.log_samples(
            {"step": step, "kind": "validation", "prompt": p, "response": t, "ground_truth": t, "score": float(good)}
            for p, t, good in rows
        )
    config = "run: {steps: 8}\nmodel: m\npools: {a: {devices_per_node: 2}}\nroles: {actor: {pool: a, tp: 2}}\n"
    (tmp_path / "demo" / "config.yaml").write_text(config)
    page = report(tmp_path / "demo")
    assert "0.430 → 0.750 (+0.320)" in page.text and "5 of 8" in page.text
    assert "TP2 x PP1 x DP1" in page.text and config in page.text
    assert "not finite numbers at step 2." in page.text
    assert "saves 1.5 s a step: one after the other they would take 5 s" in page.text  # 1 + 2 + 2 against 3.5
    assert "response at step 0" in page.text and "response at step 5" in page.text
    assert "<script>alert(1)</script>" in page.text  # as text: no script tag was made of it
    for title in ("Validation", "Train score", "KL", "Policy loss", "Learning rate", "Phases"):
        assert title in page.text


def test_pools_predictions_guards_and_versions(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    for step in (1, 2):
        pools = {"perf/busy_share/train": 0.25 * step, "perf/busy_share/driver": 0.0, "perf/driver_share": 0.125}
        memory = {"perf/max_memory_allocated_gb/actor": 11.0, "perf/predicted_memory_gb/actor": 10.0}
        guards = {"guard/entropy": float(step), "guard/kl": 0.0, "guard/rate_factor": 0.5, "guard/kl_factor": 1.0}
        seconds = {"timing_s/step": 4.0, "timing_s/gen": 1.0, "perf/predicted_s/step": 3.5}
        log.append(step, {**pools, **memory, **guards, **seconds, "reward/failed_rows": 1.0, "odd/<b>": 3.0})
    (tmp_path / "config.yaml").write_text("run: {steps: 7}\n")
    (tmp_path / "versions.json").write_text('{"python": "3.12.1", "vllm": "1.2<3"}')
    page = report(tmp_path)
    assert "38% on average" in page.text and "12% on average" in page.text and "driver (rewards)" in page.text
    assert "train: 25%" in page.text and "train: 50%" in page.text
    assert "measured" in page.text and "actor, predicted" in page.text
    assert "The guard entropy is beyond its limit since 2 steps." in page.text and "guard kl is" not in page.text
    assert "2 rewards failed and counted as 0." in page.text
    assert "20 s at this pace" in page.text
    assert "python 3.12.1, vllm 1.2<3" in page.text
    assert "Every metric that was logged: 14" in page.text and "odd/<b>" in page.text
    (tmp_path / "versions.json").write_text('{"python"')
    assert "python" not in report(tmp_path).text
    (tmp_path / "versions.json").write_text(versions())
    assert f"megappo {__version__}, python {platform.python_version()}, torch 2." in report(tmp_path).text


def test_training_on_examples(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    for step in (1, 2):
        log.append(step, {"train/loss": 0.7 / step, "val/loss": 0.69, "train/accuracy": 0.6, "train/lr": 1e-3})
    (tmp_path / "config.yaml").write_text("pools: {a: {devices_per_node: 2}}\nrole: {pool: a, tp: 2}\n")
    page = report(tmp_path)
    assert "Training on examples" in page.text and "TP2 x PP1 x DP1" in page.text
    assert all(title in page.text for title in ("Loss nats", "Accuracy", "Learning rate")) and "Gap" not in page.text


def test_charts_follow_from_the_names_that_were_logged() -> None:
    names = [
        *("val-core/a/b/acc/mean@4", "val-core/a/b/acc/best@4/mean", "val-core/a/b/acc/pass@4"),
        *("val-aux/a/b/acc/best@2/mean", "val-aux/a/b/acc/worst@4/mean", "val-aux/a/b/acc/worst@4/std"),
        *(
            "val-aux/a/b/reward/best@4/mean",
            "val-core/c/reward/mean@1",
            "canary/c/acc/mean@1",
            "canary/c/reward/mean@1",
        ),
        *("reward/acc/mean", "reward/failed_rows", "guard/kl", "guard/rate_factor", "staleness/max"),
    ]
    groups = chart_groups(names)
    found = {chart.title: dict(chart.metrics) for charts in groups.values() for chart in charts}
    assert found["Validation"] == {"val-core/a/b/acc/mean@4": "a/b acc", "val-core/c/reward/mean@1": "c reward"}
    assert found["Canary"] == {"canary/c/acc/mean@1": "c acc"}
    assert list(found["a/b acc"].items()) == [
        ("val-core/a/b/acc/pass@4", "pass@4"),
        ("val-core/a/b/acc/best@4/mean", "best@4"),
        ("val-core/a/b/acc/mean@4", "mean@4"),
        ("val-aux/a/b/acc/worst@4/mean", "worst@4"),
    ]
    assert "c reward" not in found
    assert found["Reward components"] == {"reward/acc/mean": "acc"}
    assert found["Staleness"] == {"staleness/mean": "mean", "staleness/max": "oldest"}
    assert found["Guards"] == {"guard/kl": "kl"} and "guard/rate_factor" in found["What guards have set"]


def test_best_and_worst_of_steps_over_the_run() -> None:
    samples = [
        {"step": step, "kind": "train", "prompt": "p", "response": f"{step}:{score}", "score": score}
        for step in range(1, 31)
        for score in ((0.0, 1.0, 0.5, math.nan) if step > 1 else (0.5, 0.5))
    ]
    text = Page(best_and_worst([*samples, {"step": 31, "response": "unscored", "score": None}])).text
    assert "step 1" in text and "all the same" in text and "1:0.5" in text
    assert "best" in text and "30:1.0" not in text and "no score" in text and "unscored" in text
    second = spread(range(1, 32), 8)
    assert second == [1, 5, 10, 14, 18, 22, 27, 31]
    assert all(f"{step}:1.0" in text and f"{step}:0.0" in text and f"{step}:0.5" not in text for step in second[1:-1])
    assert spread([3, 4], 8) == [3, 4]


@pytest.mark.parametrize("steps", [0, 1, 2, 1000])
def test_partial_and_long_logs(tmp_path: Path, steps: int) -> None:
    fill(tmp_path, steps)
    report(tmp_path)
    assert (tmp_path / "report.html").stat().st_size < 400_000


def test_almost_nothing(tmp_path: Path) -> None:
    assert "no step is finished yet" in report(tmp_path).text
    log = RunLog(tmp_path)
    log.append(1, {"unknown": 1.0, "timing_s/step": math.nan, "critic/score/mean": math.nan})
    log.log_samples([{"step": 1, "kind": "train", "prompt": "p" * 5000, "response": None, "score": None}])
    (tmp_path / "config.yaml").write_text("{pools: {on: {devices_per_node: 2}}, roles: {actor: {pool: on}}}")
    assert "actoron2TP1 x PP1 x DP2" in report(tmp_path).text
    (tmp_path / "config.yaml").write_text("{not: [yaml")
    page = report(tmp_path)
    assert "no data" in page.text and "p" * 600 + " ..." in page.text and "(empty)" in page.text


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no such run folder; name the folder that run\.dir"):
        write_report(tmp_path / "absent")


def test_refresh(tmp_path: Path) -> None:
    assert 'http-equiv="refresh" content="5"' in write_report(tmp_path, refresh_s=5).read_text()
    assert "http-equiv" not in write_report(tmp_path).read_text()


def polylines(svg: str, css: str = "line") -> list[list[tuple[float, float]]]:
    found = re.findall(rf'<polyline class="{css}"[^>]*points="([^"]*)"', svg)
    return [[tuple(map(float, pair.split(","))) for pair in points.split()] for points in found]  # type: ignore[misc]


def test_line_chart_places_points() -> None:
    """0 at the bottom of the plot, the highest value 1/1.05 of the way up, steps from edge to edge."""
    ((first, middle, last),) = polylines(line_chart([Series("a", [(0, 0.0), (5, 0.5), (10, 1.0)])], label="x"))
    assert first == (50.0, 196.0) and last == pytest.approx((430.0, 196 - 186 / 1.05), abs=0.06)
    assert middle == pytest.approx(((first[0] + last[0]) / 2, (first[1] + last[1]) / 2), abs=0.06)


def test_line_chart_gaps_and_lonely_points() -> None:
    nan, inf = math.nan, math.inf
    points = [(float(x), y) for x, y in enumerate([1, 2, nan, 3, inf, 4, 5, 6] + [7.0] * 10)]
    svg = line_chart([Series("a", points)], label="x")
    assert [len(line) for line in polylines(svg)] == [2, 13]
    assert svg.count("<circle") == 1  # the 3 between two gaps
    assert "nan" not in svg and "inf" not in svg
    one = line_chart([Series("a", [(7, 0.0)])], label="x")
    assert one.count("<circle") == 1 and polylines(one) == []
    assert "no data" in line_chart([Series("a", [(1, nan)])], label="x")
    assert "no data" in line_chart([], label="x")


def test_all_zero_is_drawn_on_an_axis_from_zero_to_one() -> None:
    svg = line_chart([Series("a", [(1, 0.0), (2, 0.0)])], label="x")
    labels = re.findall(r'text-anchor="end">([^<]*)<', svg)
    assert [float(label) for label in labels] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    ((first, _),) = polylines(svg)
    assert first[1] == 196  # the foot of the plot


def test_stacked_bars_stand_on_each_other() -> None:
    svg = stacked_bars([1, 2], {"a": [1.0, math.nan], "b": [3.0, 2.0]}, [3.0, math.nan], label="x")
    heights = [float(h) for h in re.findall(r'<rect x="[^"]*" y="[^"]*" width="[^"]*" height="([^"]*)"', svg)]
    unit = 186 / (4 * 1.05)  # the tallest bar is 4 s
    assert heights == pytest.approx([unit, 3 * unit, 2 * unit], abs=0.11)
    ((left, right),) = polylines(svg, "total")
    assert left[1] == right[1] == pytest.approx(196 - 3 * unit, abs=0.06)
    assert "no data" in stacked_bars([], {}, [], label="x")
    assert "nan" not in stacked_bars([1], {"a": [0.0]}, [0.0], label="x")


def test_busy_strips_are_filled_to_their_share() -> None:
    drawing = busy_timeline([1, 2], {"a": [0.5, 1.0], "b": [math.nan, 0.25], "c": [math.nan] * 2}, label="x")
    bars = re.findall(r'<rect x="([^"]*)" y="[^"]*" width="([^"]*)" height="([^"]*)" fill="var\(--c(\d)\)"', drawing)
    assert [(color, float(height)) for *_, height, color in bars] == [("0", 13.0), ("0", 26.0), ("1", 6.5)]
    assert [float(x) for x, *_ in bars] == [2.0, 220.0, 220.0]
    assert "75% on average" in drawing and "nan" not in drawing and ">c<" not in drawing
    many = busy_timeline(range(1, 1001), {"a": [0.0, 1.0] * 500}, label="x")
    assert many.count("<title>") == 112 and "steps 1 to 9 (mean)\na: 44%" in many
    assert "no data" in busy_timeline([], {"a": []}, label="x")


def test_predicted_lines_are_dashed_in_the_colour_of_what_they_predict() -> None:
    lines = [Series("a", [(1, 1.0), (2, 2.0)]), Series("a, predicted", [(1, 1.5), (2, 2.5)], dashed=True)]
    drawing = line_chart([*lines, Series("b", [(1, 0.0), (2, 0.0)])], label="x")
    strokes = re.findall(r'<polyline class="line" stroke="([^"]*)"( stroke-dasharray)?', drawing)
    assert strokes == [("var(--c0)", ""), ("var(--c0)", " stroke-dasharray"), ("var(--c1)", "")]


def test_no_two_ticks_look_alike() -> None:
    drawing = line_chart([Series("a", [(1, 0.9983), (2, 0.9994)])], label="x")
    labels = re.findall(r'text-anchor="end">([^<]*)<', drawing)
    assert labels == ["0.9985", "0.9990"]


def test_ticks_and_numbers() -> None:
    assert ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(-0.03, 0.02, 4) == pytest.approx([-0.02, 0, 0.02])
    assert ticks(3, 3) == [3]
    shown = [number(v) for v in (0, 0.01234, 1.5, 123.4, 12345, 1e-6, 2.5e7, math.nan)]
    assert shown == ["0", "0.0123", "1.5", "123.4", "12.35k", "1e-06", "2.5e+07", "-"]
