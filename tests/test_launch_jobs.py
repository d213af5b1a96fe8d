"""Jobs written from a configuration: which node serves which pools, the batch script, the KubeRay manifest."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from small_project import Project, make_project

from megappo import cli
from megappo.cluster.readiness import late_nodes
from megappo.config import Config, PoolConfig, load_config
from megappo.launch import slurm
from megappo.launch.kuberay import KubeRayOptions, manifest
from megappo.launch.partitions import UNLIMITED_S, NodeKind, Partition, duration_s, parse_partitions
from megappo.layout.placement import place_pools

ROOT = Path(__file__).resolve().parent.parent
SINFO = """\
gpu*|1-00:00:00|4|gpu:h200:8(S:0-1),nvme:1
gpu*|1-00:00:00|2|gpu:4
big|infinite|1|gpu:a100:16
cpu|30:00|9|(null)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.chdir(tmp_path)
    return make_project(tmp_path)


@pytest.fixture
def config(project: Project) -> Config:
    return load_config("config.yaml", ["run.device=cuda"])


def pool(nodes: int, width: int) -> PoolConfig:
    return PoolConfig(nodes=nodes, devices_per_node=width)


def test_pools_share_nodes_where_they_fit_and_never_twice_with_themselves() -> None:
    pools = {"serve": pool(2, 2), "train": pool(2, 8), "value": pool(1, 4), "score": pool(1, 2)}
    # By hand: two nodes of 8 for train; 4 + 2 + 2 fill a third; serve's second node is a fourth.
    assert place_pools(pools, 8) == (("train",), ("train",), ("value", "serve", "score"), ("serve",))
    assert place_pools({"a": pool(3, 1)}, 8) == (("a",), ("a",), ("a",))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("1:30", 90), ("12:00:00", 43200), ("2-0", 172800), ("1-02:30", 95400), ("1-02:30:05", 95405)],
)
def test_times_as_slurm_writes_them(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "x", "1:2:3:4", "-5", "0", "1-", "1.5", "12h"])
def test_times_that_are_none(text: str) -> None:
    with pytest.raises(ValueError):
        duration_s(text)


def test_partitions() -> None:
    assert parse_partitions(SINFO) == {
        "gpu": Partition("gpu", True, 86400, (NodeKind(4, 8), NodeKind(2, 4))),
        "big": Partition("big", False, UNLIMITED_S, (NodeKind(1, 16),)),
        "cpu": Partition("cpu", False, 1800, (NodeKind(9, 0),)),
    }


@pytest.mark.parametrize(
    ("options", "pools", "lines"),
    [
        ({}, {}, []),
        ({"partition": "gppu"}, {}, ["--partition: gppu does not exist: partitions are gpu, big, cpu"]),
        ({"time": "2-00:00:00"}, {}, ["--time: 2-00:00:00 is more than the 24 h that partition gpu allows: "]),
        ({"time": "10"}, {}, ["--checkpoint-before: 900 s is not less than the 600 s of --time: "]),
        ({"time": "soon"}, {}, ["--time: 'soon' is no time: "]),
        ({"setup": "modules.sh"}, {}, ["--setup: modules.sh: no such file: "]),
        (
            {},
            {"train": pool(1, 16)},
            [
                "pools.train.devices_per_node: 16 does not fit on a node (the largest nodes have 8): spread the pool "
                "over more nodes, for instance {nodes: 2, devices_per_node: 8}, "
            ],
        ),
        (
            {"partition": "big"},
            {"train": pool(1, 16)},
            ["pools: they need 2 nodes with 16 GPUs, partition big has 1: "],
        ),
        ({}, {"train": pool(5, 8)}, ["pools: they need 6 nodes with 8 GPUs, partition gpu has 4: "]),
        ({"devices_per_node": 4}, {"train": pool(5, 4)}, []),
        (
            {"partition": "cpu", "time": "20"},
            {},
            ["--devices-per-node: no node of partition cpu has 4 GPUs, the largest has 0: "],
        ),
        ({}, {"a b": pool(1, 1)}, ["pools.a b: nodes announce the pools"]),
    ],
)
def test_problems(config: Config, options: dict[str, object], pools: dict[str, PoolConfig], lines: list[str]) -> None:
    config = replace(config, pools={**config.pools, **pools})
    found = slurm.problems(config, slurm.SlurmOptions(**options), parse_partitions(SINFO))  # type: ignore[arg-type]
    assert len(found) == len(lines), found
    for line, words in zip(found, lines, strict=True):
        assert line.startswith(words)


def test_a_batch_script(config: Config, tmp_path: Path) -> None:
    (tmp_path / "modules.sh").touch()
    options = slurm.SlurmOptions(account="lab", time="6:00:00", setup="modules.sh", sbatch=("--exclude=n7",))
    text = slurm.batch_script(config, options, parse_partitions(SINFO))
    directives = re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE)
    # 4 + 2 + 2 devices fit on one node of 8.
    wanted = {"--nodes=1", "--gpus-per-node=8", "--time=6:00:00", "--account=lab", "--signal=B:USR1@900", "--requeue"}
    assert wanted | {"--exclude=n7", f"--output={tmp_path}/run/logs/slurm-%j.log"} <= set(directives)
    assert not any(directive.startswith("--qos") for directive in directives)
    script = tmp_path / "job.sh"
    script.write_text(text)
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True).stderr == ""
    # What the job will read back is the configuration, and its variables survive the shell.
    until = text.index("# --- the same for every job")
    (tmp_path / "head.sh").write_text(f'{text[:until]}\nread_config >read.yaml\nprintf %s "$MEGAPPO_NODE_POOLS"\n')
    shown = subprocess.run(["bash", "head.sh"], capture_output=True, text=True, check=True).stdout
    assert shown == "train value serve"
    assert load_config("read.yaml") == config


def test_the_command_without_slurm(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(project.folder))
    command = ["launch", "slurm", "config.yaml", "--time=1:00:00"]
    assert cli.main([*command, "--submit", "run.steps=7"]) == 2
    assert "error: --submit: no sbatch here" in capsys.readouterr().err
    assert cli.main([*command, "run.steps=7"]) == 0
    out, err = capsys.readouterr()
    assert "sbatch run/launch/job.sh" in out and "warning: no sinfo here" in err
    assert "steps: 7" in (project.folder / "run/launch/job.sh").read_text()
    assert cli.main([*command, "roles.actor.tp=3"]) == 2
    assert "roles.actor.tp: 3 does not divide" in capsys.readouterr().err


def test_nodes_that_are_late() -> None:
    answers = iter([["node_a"], ["node_a", "pool_x"], ["node_a", "node_b"]])
    assert late_nodes(["a", "b"], lambda: next(answers), 60) == []
    assert late_nodes(["a", "b", "c"], lambda: ["node_b"], 0) == ["a", "c"]


def test_a_kuberay_manifest(config: Config) -> None:
    config = replace(config, pools={**config.pools, "train_A": pool(3, 8)})
    options = KubeRayOptions(image="registry/megappo:1", claim="lab", mount="/lab")
    stored, job = yaml.safe_load_all(manifest(config, options))
    Path("stored.yaml").write_text(stored["data"]["config.yaml"])
    assert load_config("stored.yaml") == config
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["headGroupSpec"]["rayStartParams"]["num-gpus"] == "0"
    groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    assert set(groups) == {"train", "value", "serve", "train-a"}
    group = groups["train-a"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (3, 3, 3)
    # KubeRay pastes it into a command line, where the shell takes one layer of quotes off.
    pasted = subprocess.run(
        ["bash", "-c", f"printf %s {group['rayStartParams']['resources']}"], capture_output=True, text=True, check=True
    )
    assert json.loads(pasted.stdout) == {"pool_train_A": 1}
    pod = group["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert {"name": "MEGAPPO_PIN_POOLS", "value": "1"} in container["env"]


@pytest.mark.parametrize("name", ["local.sh", "ray/submit.sh", "slurm/job.sh", "slurm/node.sh"])
def test_scripts_parse(name: str) -> None:
    path = ROOT / "launch" / name
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True).stderr == ""
    if name != "slurm/job.sh":  # a part of a script
        assert os.access(path, os.X_OK)
