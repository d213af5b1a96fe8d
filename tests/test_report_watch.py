"""The page of a run that goes on: written anew when the log has grown, whatever state the folder is in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megappo.cli import main
from megappo.report import watch as module
from megappo.report.run_log import RunLog
from megappo.report.watch import REFRESH_S, watch


def watched(run: Path, *events: Callable[[], object]) -> list[str]:
    """What is said while one event happens between two looks, and then Ctrl-C is pressed."""
    said: list[str] = []
    left = list(events)

    def sleep(seconds: float) -> None:
        if not left:
            raise KeyboardInterrupt
        left.pop(0)()

    watch(run, say=said.append, sleep=sleep)
    return said


def nothing() -> None:
    pass


def test_follows_a_run_from_before_it_is_there(tmp_path: Path) -> None:
    run, page = tmp_path / "run", tmp_path / "run" / "report.html"
    seen: list[str] = []

    def look() -> None:
        seen.append(page.read_text())

    def half() -> None:
        with open(run / "log.jsonl", "a") as file:
            file.write('{"step": 2, "time": 1.0, "met')

    said = watched(
        run,
        nothing,
        run.mkdir,
        look,
        lambda: RunLog(run).append(1, {"critic/score/mean": 0.123}),
        look,
        half,
        look,
        lambda: RunLog(run).append(2, {"critic/score/mean": 0.456}),
        look,
    )
    assert said == [
        f"{run} is not there yet: waiting for it (Ctrl-C ends)",
        f"{page}: written anew as the run goes on (Ctrl-C ends)",
        str(page),
    ]
    assert [text.count(f'http-equiv="refresh" content="{REFRESH_S}"') for text in seen] == [1, 1, 1, 1]
    assert "no step is finished yet" in seen[0]
    assert [("0.123" in text, "0.456" in text) for text in seen] == [
        *((False, False), (True, False), (True, False), (True, True)),
    ]
    assert "http-equiv" not in page.read_text() and "0.456" in page.read_text()


def test_writes_only_what_has_changed_and_outlives_a_broken_log(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    RunLog(tmp_path).append(1, {"x": 1.0})
    times: list[int] = []

    def look() -> None:
        times.append(page.stat().st_mtime_ns)

    def break_it() -> None:
        (tmp_path / "log.jsonl").write_text("broken\n{}\n")

    said = watched(tmp_path, look, nothing, look, break_it, nothing, look, lambda: mend(tmp_path), look)
    assert times[0] == times[1] == times[2] != times[3]
    assert len(said) == 4 and "no new report" in said[1] and "log.jsonl:1: not a JSON object" in said[1]
    assert said[2] == said[0]


def mend(run: Path) -> None:
    (run / "log.jsonl").unlink()
    RunLog(run).append(1, {"x": 2.0})


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "watch", lambda run: print(f"watching {run}"))
    assert main(["report", str(tmp_path), "--watch"]) == 0
    assert capsys.readouterr().out == f"watching {tmp_path}\n"
