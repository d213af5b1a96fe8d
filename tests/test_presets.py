"""The configurations that ship: each passes check, and fits by plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from qwen import write_qwen
from small_run import ROOT

from megappo.check import check_file
from megappo.plan.command import Options, plan
from megappo.plan.memory import peaks
from megappo.plan.profile import load_profile

PRESETS = sorted((ROOT / "configs").glob("qwen2.5_*.yaml"))


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for size in ("0.5B", "7B", "32B", "72B"):
        write_qwen(tmp_path / "models" / f"Qwen2.5-{size}-Instruct", size)


def test_there_is_one_for_each_number_of_devices() -> None:
    assert [path.stem.rsplit("_", 1)[1] for path in PRESETS] == ["1gpu", "32gpu", "128gpu", "8gpu", "1gpu"]


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_it_passes_check_and_fits(path: Path, models: None) -> None:
    config, report = check_file(path, planning=True)
    assert config is not None and report.errors == ()
    # Only what a user has yet to bring is missing: no advice is left open.
    lacking = ("has no weights", "has no tokenizer", "no such file")
    assert [line for line in report.warnings if not any(words in line for words in lacking)] == []
    devices = sum(pool.devices for pool in config.pools.values())
    assert path.stem.endswith(f"_{devices}gpu")
    lines: list[str] = []
    plan(config, Options(config.run.device_profile), lines.append)  # raises if it does not fit
    assert f"{devices} x H100" in lines[0]
    device = load_profile(config.run.device_profile)
    assert all(peak.turn.need < 0.95 * device.memory for peak in peaks(config, device))


@pytest.mark.parametrize("path", [path for path in PRESETS if "32gpu" in path.stem or "128gpu" in path.stem])
def test_large_ones_have_separate_pools(path: Path, models: None) -> None:
    config, _ = check_file(path, planning=True)
    assert config is not None
    assert len({config.roles.actor.pool, config.roles.rollout.pool, config.roles.megatron["critic"].pool}) == 3


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_what_it_says_to_call_is_itself(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if line.startswith("#   megappo ") and "configs/" in line]
    assert lines and all(f"configs/{path.name}" in line for line in lines)
