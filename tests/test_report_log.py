"""The run log survives kills and resumes; the console says what happened."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest

from megappo.report.console import Console, duration, validation_scores
from megappo.report.parts import seconds_of
from megappo.report.roles import RoleRow, describe_roles
from megappo.report.run_log import LogError, RunLog, read_log, read_samples


def steps_of(run: Path) -> list[int]:
    return [row["step"] for row in read_log(run)]


def test_append_and_read(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "new" / "run")
    log.append(0, {"val-core/a/reward/mean@1": 0.25})
    log.append(1, {"x": math.nan, "y": math.inf, "n": 3})
    first, second = read_log(tmp_path / "new" / "run")
    assert first["step"] == 0 and first["metrics"] == {"val-core/a/reward/mean@1": 0.25}
    assert second["time"] >= first["time"] > 1.6e9
    assert math.isnan(second["metrics"]["x"]) and math.isnan(second["metrics"]["y"])
    assert second["metrics"]["n"] == 3 and isinstance(second["metrics"]["n"], int)
    for line in (tmp_path / "new" / "run" / "log.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))


def test_no_log_is_an_empty_log(tmp_path: Path) -> None:
    assert read_log(tmp_path) == [] and read_samples(tmp_path) == []


@pytest.mark.parametrize("torn", ['{"step": 2, "ti', '{"step": 2, "time": 1.0, "metrics": {}}'])
def test_torn_last_line(tmp_path: Path, torn: str) -> None:
    """A line counts once its newline is there: the writer may have been killed just before it."""
    log = RunLog(tmp_path)
    log.append(1, {"x": 1.0})
    with open(tmp_path / "log.jsonl", "a") as file:
        file.write(torn)
    assert steps_of(tmp_path) == [1]
    RunLog(tmp_path).append(2, {"x": 2.0})
    assert steps_of(tmp_path) == [1, 2]
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 2


def test_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"step": 1, "metrics": {}}\nnot json\n{"step": 3, "metrics": {}}\n')
    for read in (read_log, RunLog):  # a run that would go on says so at once
        with pytest.raises(LogError, match=r"log\.jsonl:2: not a JSON object"):
            read(tmp_path)
    (tmp_path / "log.jsonl").write_text('{"step": 1, "metrics": {}}\n{"stop": 2}\n')
    for read in (read_log, RunLog):
        with pytest.raises(LogError, match=r"log\.jsonl:2: not a log object"):
            read(tmp_path)
    (tmp_path / "log.jsonl").write_text('{"step": 1, "metrics": {"score": "0.5"}}\n')
    with pytest.raises(LogError, match=r"log\.jsonl:1: score is '0\.5', not a number"):
        RunLog(tmp_path)
    (tmp_path / "log.jsonl").unlink()
    for line, said in (("[]", "not a JSON object"), ('{"step": null}', "step is None, not a whole number")):
        (tmp_path / "samples.jsonl").write_text(line + "\n")
        with pytest.raises(LogError, match=rf"samples\.jsonl:1: {said}"):
            RunLog(tmp_path)


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    (tmp_path / "log.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: .*/log\.jsonl"):
        log.append(1, {})


def test_truncate_after(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    for step in range(6):
        log.append(step, {"x": step / 3})
        log.log_samples([{"step": step, "kind": "train", "prompt": "p", "response": "r", "score": 1.0}])
    before = (tmp_path / "log.jsonl").read_bytes().splitlines(keepends=True)
    assert log.truncate_after(3) == 2
    assert (tmp_path / "log.jsonl").read_bytes() == b"".join(before[:4])  # the kept lines are the same bytes
    assert [row["step"] for row in read_samples(tmp_path)] == [0, 1, 2, 3]
    log.append(4, {"x": 9.0})
    assert steps_of(tmp_path) == [0, 1, 2, 3, 4]
    assert log.truncate_after(10) == 0
    assert log.truncate_after(-1) == 5 and steps_of(tmp_path) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.jsonl", "samples.jsonl"]


def test_samples_keep_any_text(tmp_path: Path) -> None:
    odd = "two\nlines, é, \u2028, half a pair \ud83d, <b>"
    sample = {"step": 0, "kind": "validation", "prompt": odd, "response": "", "score": math.nan, "extra": {"a": [1]}}
    RunLog(tmp_path).log_samples([sample, {**sample, "score": 0.5}])
    first, second = read_samples(tmp_path)
    assert first["prompt"] == odd and first["score"] is None and first["extra"] == {"a": [1]}
    assert second["score"] == 0.5


def make_console(color: bool = False) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(20, stream=stream, color=color, clock=lambda: 0.0), stream


def test_console_step_line() -> None:
    console, stream = make_console()
    phases = {"timing_s/gen": 1.0, "timing_s/update_actor": 2.0, "timing_s/update_critic": 1.5}
    console.step(1, {"critic/score/mean": 0.5, "actor/entropy": 0.25, "timing_s/step": 3.25, **phases})
    console.step(12, {"critic/score/mean": 0.75, "timing_s/step": 5.0, **phases})
    first, second = stream.getvalue().splitlines()
    assert first.startswith("step  1/20  score  0.500") and "entropy  0.250" in first
    assert "train  2.00" in first  # 1.0 + 2.0 + 1.5 s do not fit into 3.25 s: the updates overlapped
    assert "train  3.50" in second  # and here they took turns
    assert "left 1 min 02 s" in first and "left 33 s" in second  # median(3.25, 5) * 8
    assert first.index("| gen") == second.index("| gen")
    assert "nan" not in second and "\033" not in stream.getvalue()


def test_console_validation_and_finish() -> None:
    console, stream = make_console()
    console.step(0, {"val-core/sums/reward/mean@1": 0.43})
    console.step(20, {"val-core/sums/reward/mean@1": 0.8, "critic/score/mean": math.nan})
    console.finish("report: here")
    text = stream.getvalue()
    assert "step  0" not in text and "validation at step 0: sums reward 0.4300" in text
    assert "WARNING: step 20: not a finite number: critic/score/mean" in text
    assert "validation sums reward: 0.4300 -> 0.8000" in text and text.endswith("report: here\n")


def test_a_resumed_run_tells_of_its_first_validation() -> None:
    console, stream = make_console()
    name = "val-core/sums/acc/mean@1"
    console.went_before([{"step": 0, "metrics": {name: 0.405}}, {"step": 5, "metrics": {name: 0.685}}])
    console.step(8, {name: 0.755})
    console.finish()
    assert "validation sums acc: 0.4050 -> 0.7550" in stream.getvalue()


def test_a_pause_is_no_time_of_the_run() -> None:
    """A step takes what it says, however long after the one before it was logged."""
    rows = [
        {"step": 0, "time": 0.0, "metrics": {"timing_s/testing": 2.0}},
        {"step": 1, "time": 9000.0, "metrics": {"timing_s/step": 3.0, "timing_s/gen": 1.0}},
        {"step": 2, "time": 9005.0, "metrics": {"timing_s/step": math.nan, "timing_s/save_checkpoint": 1.0}},
    ]
    assert seconds_of(rows) == 6.0


def test_console_start_and_colour() -> None:
    console, stream = make_console(color=True)
    console.start("run demo", [RoleRow("actor", "train", "TP2 x PP2 x DP1", 4)], {"model": "tiny"})
    console.warn("rank 3")
    assert "\033[1mrun demo\033[0m" in stream.getvalue() and "\033[33mWARNING: rank 3\033[0m" in stream.getvalue()
    assert "  actor  train        4  TP2 x PP2 x DP1" in stream.getvalue()


def test_validation_scores_prefer_accuracy() -> None:
    metrics = {"val-core/org/set/reward/mean@1": 0.1, "val-core/org/set/acc/mean@1": 0.2, "val-aux/x/y/z": 1.0}
    assert validation_scores(metrics) == {"org/set acc": 0.2}
    assert validation_scores(dict(reversed(metrics.items()))) == {"org/set acc": 0.2}


def test_duration() -> None:
    assert [duration(s) for s in (0.4, 59.4, 59.6, 3600, 7265)] == [
        "0 s",
        "59 s",
        "1 min 00 s",
        "1 h 00 min",
        "2 h 01 min",
    ]


def test_describe_roles() -> None:
    config = {
        "pools": {"a": {"nodes": 2, "devices_per_node": 4}},
        "roles": {
            "reward": {"function": "f", "by_source": {"x": "f", "y": "g"}, "processes": 2},
            "rollout": {"pool": "a", "tp": 2},
            "actor": {"pool": "a", "tp": 2, "pp": 2, "vpp": 2, "sequence_parallel": True},
            "reference": None,
        },
    }
    assert describe_roles(config) == [
        RoleRow("actor", "a", "TP2 x PP2 x VPP2 x DP2 + SP", 8),
        RoleRow("rollout", "a", "4 engines x TP2", 8),
        RoleRow("reward", "driver", "2 processes: f, g", 0),
    ]
    assert describe_roles({}) == [] and describe_roles({"roles": {"actor": "text"}})[0].devices == 0
