"""The ``megappo`` command, looked at from outside where that matters."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from small_project import Project, make_project, write_model

from megappo.check import Report
from megappo.cli import main
from megappo.cluster.forks import Forks
from megappo.config import Config, load_config
from megappo.models.spec import ModelError

HEAVY = ("torch", "ray", "vllm", "transformers", "megatron", "tensorboard", "wandb", "mlflow")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.chdir(tmp_path)
    return make_project(tmp_path)


def command(folder: Path, *arguments: str, flags: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    package = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "PYTHONPATH": str(package)}
    line = [sys.executable, *flags, "-m", "megappo", *arguments]
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)


TABLE = """\
role       pool   devices  tp  pp  dp  model
actor      train  4        2   2   1   FOLDER/model
critic     value  2        1   2   1   FOLDER/model
reference  value  2        2   1   1   FOLDER/model
rollout    serve  2        1   1   2   FOLDER/model
"""


def test_command_check(project: Project) -> None:
    done = command(project.folder, "check", "config.yaml")
    assert (done.returncode, done.stdout, done.stderr) == (0, TABLE.replace("FOLDER", str(project.folder)), "")


@pytest.mark.alone
def test_command_check_is_quick_and_imports_nothing_heavy(project: Project) -> None:
    command(project.folder, "check", "config.yaml")  # the first call may compile
    before = os.times()
    assert command(project.folder, "check", "config.yaml").returncode == 0
    after = os.times()  # of the processor, which other work on the machine does not lengthen
    assert after.children_user + after.children_system - before.children_user - before.children_system < 2
    done = command(project.folder, "check", "config.yaml", flags=["-X", "importtime"])
    imported = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert {"megappo", "yaml", "pyarrow"} <= imported, "the list of imports is what it should be"
    assert imported.isdisjoint(HEAVY)


def test_check_imports_nothing_heavy_with_a_tracker(project: Project) -> None:
    code = (
        "import sys; from megappo.cli import main; status = main(['check', 'config.yaml', "
        f"'run.trackers=[tensorboard]']); print(status, sorted(set(sys.modules) & set({HEAVY!r})))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


@pytest.mark.parametrize("word", ["check", "train"])
def test_command_refuses(project: Project, word: str) -> None:
    arguments = (word, "config.yaml", "roles.rollout.tp=3", "pools.extra.devices_per_node=1", "ppo.mini_batch=99")
    done = command(project.folder, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "warning: pools.extra: no role uses it: leave it out, or name it as a role's pool",
        "error: roles.rollout.tp: 3 does not divide 8 attention heads and neither divides nor is a multiple of "
        "4 key/value heads and does not divide 128 padded vocabulary rows: legal are 1, 2, 4, 8",
        "error: roles.rollout.tp: an engine of 3 devices does not fit in a node of 2: legal are 1, 2",
        "error: ppo.mini_batch: 99 is more than the 32 responses of a step (data.prompts_per_step * "
        "roles.rollout.samples_per_prompt): give at most 32",
    ]


def test_command_train_passes_the_configuration_on(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []
    monkeypatch.setitem(
        sys.modules, "megappo.trainer", SimpleNamespace(train=lambda config, forks: not trained.append(config))
    )
    assert main(["train", "config.yaml", "run.steps=7"]) == 0
    assert trained == [load_config("config.yaml", ["run.steps=7"])]


def test_command_shows_our_own_errors_without_a_traceback(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raising(error: Exception) -> None:
        def train(config: Config, forks: Forks) -> None:
            raise error

        monkeypatch.setitem(sys.modules, "megappo.trainer", SimpleNamespace(train=train))

    raising(ModelError(["one", "two"]))
    assert main(["train", "config.yaml"]) == 2
    assert capsys.readouterr().err == "error: one\nerror: two\n"
    raising(KeyError("a fault of the program"))
    with pytest.raises(KeyError):
        main(["train", "config.yaml"])


TRAINING = "the same command goes on from the last checkpoint, or from the beginning where there is none yet"
INTERRUPTED = {
    "check c": "the same command begins again",
    "plan c": "the same command begins again",
    "train c": TRAINING,
    "sft c": TRAINING,
    "reward-train c": TRAINING,
    "score c data.parquet out.parquet": "out.parquet was not written; the same command begins again",
    "launch slurm c --submit": "if it was to be submitted, squeue --me says whether it was",
    "convert model dst": "dst is whole or as it was before; the same command begins again, or finds nothing to do",
}


@pytest.mark.parametrize("asked", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("line", INTERRUPTED)
def test_an_interrupted_command_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, asked: signal.Signals
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        os.kill(os.getpid(), asked)
        time.sleep(1)

    for name in ("cli.check_file", "cli.check_supervised_file", "launch.command.check_file", "convert.command.convert"):
        monkeypatch.setattr(f"megappo.{name}", interrupted)
    before = signal.getsignal(asked)
    assert main(line.split()) == 130
    assert capsys.readouterr().err == f"interrupted: {INTERRUPTED[line]}\n"
    assert signal.getsignal(asked) == before


def test_a_command_that_ray_ends_is_interrupted_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """ray.init has a SIGTERM handler of its own until it is done; any other exit stays one."""
    monkeypatch.setattr("megappo.cli.check_file", lambda *_: sys.exit(signal.SIGTERM))
    assert main(["check", "c"]) == 130
    assert capsys.readouterr().err.startswith("interrupted: ")
    monkeypatch.setattr("megappo.cli.check_file", lambda *_: sys.exit(3))
    with pytest.raises(SystemExit, match="3"):
        main(["check", "c"])


def test_command_config_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 0
    assert "run.steps: required\n    training steps in all (an integer >= 1)\n" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert re.fullmatch(r"megappo \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_command_data_arithmetic(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "arithmetic", "out", "--train", "30", "--validation", "7", "--seed", "3"]) == 0
    assert capsys.readouterr().out == "out/train.parquet\nout/validation.parquet\n"
    assert pq.read_metadata("out/train.parquet").num_rows == 30
    assert project.report("data.train=out/train.parquet", "data.validation=out/validation.parquet") == Report()
    assert main(["data", "arithmetic", "out", "--train", "0"]) == 2
    assert capsys.readouterr().err.startswith("error: --train: 0, ")
    assert main(["data", "arithmetic", "config.yaml"]) == 2
    assert capsys.readouterr().err == "error: config.yaml: is a file: give a folder as OUT\n"
    assert main(["data", "arithmetic", "/proc/none"]) == 2
    assert capsys.readouterr().err == (
        "error: /proc/none: No such file or directory: give a folder as OUT that can be written\n"
    )


def test_command_report_of_no_run(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "run"]) == 2
    assert capsys.readouterr().err == "error: run: has no log.jsonl: give the folder of a run (run.dir)\n"


def test_command_report_of_a_broken_log(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    (project.folder / "run").mkdir()
    (project.folder / "run/log.jsonl").write_text("{}x\n")
    assert main(["report", "run"]) == 2
    assert capsys.readouterr().err.startswith("error: run/log.jsonl:1: not a JSON object (")


@pytest.mark.parametrize("word", [["check"], ["train"], ["plan"], ["launch", "slurm"]], ids=" ".join)
def test_a_configuration_of_another_command_is_one_error(
    project: Project, capsys: pytest.CaptureFixture[str], word: list[str]
) -> None:
    (project.folder / "reward.yaml").write_text("run: {dir: r}\nmodel: m\nrole: {pool: train}\nlr: 1e-5\n")
    assert main([*word, "reward.yaml"]) == 2
    assert capsys.readouterr().err == (
        "error: reward.yaml: this is a configuration of reward-train or sft: megappo check reward.yaml --for "
        "reward-train (or sft)\n"
    )


def test_the_readmes_example_is_what_the_command_prints(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parent.parent
    text = (root / "README.md").read_text()
    example = re.search(r"\n\$ megappo check configs/quickstart.yaml (.*)\n((?:error: .*\n)+)", text)
    assert example is not None
    (tmp_path / "configs").symlink_to(root / "configs")
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256}
    write_model(tmp_path / "runs/quickstart/model", max_position_embeddings=512, **sizes)
    main(["data", "arithmetic", str(tmp_path / "runs/quickstart/data")])
    done = command(tmp_path, "check", "configs/quickstart.yaml", *example[1].split())
    assert (done.returncode, done.stdout, done.stderr) == (2, "", example[2])


def test_overrides_are_not_called_required(capsys: pytest.CaptureFixture[str]) -> None:
    for word in (["check"], ["plan"], ["doctor", "--nope"], ["launch", "slurm"]):
        with pytest.raises(SystemExit):
            main(word)
        assert "key=value" not in capsys.readouterr().err.splitlines()[-1]
