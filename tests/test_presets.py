"""The configurations that ship: each passes check, and fits by plan."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from qwen import write_qwen
from small_run import ROOT

from megappo.check import check_file
from megappo.check.algorithm import ppo_findings
from megappo.check.findings import Advice
from megappo.config import load_config
from megappo.plan.command import Options, plan
from megappo.plan.memory import peaks
from megappo.plan.profile import load_profile
from megappo.plan.sync import weight_sync

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


def test_only_adapters_are_planned_to_travel(models: None) -> None:
    config, _ = check_file(ROOT / "configs" / "qwen2.5_7b_lora_1gpu.yaml", planning=True)
    assert config is not None
    told, phase = weight_sync(config, load_profile("H100"))
    # 28 layers of rank 16: q and o are 3584 x 3584, k and v 3584 x 512, gate, up and down 3584 x 18944; bfloat16.
    each = 16 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))
    assert sum(told.planned.values()) == 2 * 28 * each
    assert phase.parts["merging from host memory"] > 0.2  # seconds: 14 GiB at 55 GB/s


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_what_it_says_to_call_is_itself(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if line.startswith("#   megappo ") and "configs/" in line]
    assert lines and all(f"configs/{path.name}" in line for line in lines)


def test_the_rows_of_papers_in_the_readme_are_what_they_say() -> None:
    """Each fits into a configuration; those of papers without a KL term have none, and need no reference."""
    table = (ROOT / "README.md").read_text().partition("| to have |")[2].partition("\n\n")[0]
    rows = dict(re.findall(r"^\| ([^|]+) \| [^`|]*`([^`]+)`", table, re.MULTILINE))
    without_kl = {"Dr. GRPO", "DAPO", "GSPO", "CISPO"}
    assert {"PPO with a critic", "GRPO", "ReMax", *without_kl} <= rows.keys()
    for name, settings in rows.items():
        parsed = yaml.safe_load("{" + settings + "}")
        overrides = [f"ppo.{key}={json.dumps(value)}" for key, value in parsed.items()]
        if name in without_kl:
            overrides += ["roles.reference=null"]
        if parsed.get("estimator", "gae") != "gae":
            overrides += ["roles.critic=null", "roles.rollout.samples_per_prompt=2"]
        config = load_config(ROOT / "configs" / "quickstart.yaml", [*overrides, "data.max_response=8192"])
        assert not [line for line in ppo_findings(config) if not isinstance(line, Advice)], name
