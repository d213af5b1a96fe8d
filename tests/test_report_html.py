"""The report comes out for any log, holds everything inside itself, and its charts are drawn where the values are."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megappo.report.charts import Series, line_chart, number, stacked_bars, ticks
from megappo.report.html import write_report
from megappo.report.run_log import RunLog

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


def test_ticks_and_numbers() -> None:
    assert ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(-0.03, 0.02, 4) == pytest.approx([-0.02, 0, 0.02])
    assert ticks(3, 3) == [3]
    shown = [number(v) for v in (0, 0.01234, 1.5, 123.4, 12345, 1e-6, 2.5e7, math.nan)]
    assert shown == ["0", "0.0123", "1.5", "123.4", "12.35k", "1e-06", "2.5e+07", "-"]
