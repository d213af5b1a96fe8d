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
from megappo.cluster.job_environment import job_environment
from megappo.cluster.readiness import late_nodes
from megappo.config import Config, PoolConfig, load_config
from megappo.launch import slurm
from megappo.launch.kuberay import KubeRayOptions, manifest
from megappo.launch.partitions import UNLIMITED_S, NodeKind, Partition, duration_s, parse_partitions
from megappo.launch.problems import LaunchError
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
        ({"time": "20:00:00", "checkpoint_before_s": 65535}, {}, []),
        (
            {"time": "20:00:00", "checkpoint_before_s": 65536},
            {},
            ["--checkpoint-before: 65536 s is more than the 65535 s that sbatch's --signal knows: "],
        ),
    ],
)
def test_problems(config: Config, options: dict[str, object], pools: dict[str, PoolConfig], lines: list[str]) -> None:
    config = replace(config, pools={**config.pools, **pools})
    found = slurm.problems(config, slurm.SlurmOptions(**options), parse_partitions(SINFO))  # type: ignore[arg-type]
    assert len(found) == len(lines), found
    for line, words in zip(found, lines, strict=True):
        assert line.startswith(words)


MIXED = """\
gpu*|infinite|100|gpu:8
gpu*|infinite|1|gpu:16
"""


@pytest.mark.parametrize(
    ("pools", "nodes", "width"),
    [
        ({"a": pool(16, 8)}, 16, 8),  # not of 16, of which there is one
        ({"a": pool(1, 8)}, 1, 8),  # not of 16, half of which would idle
        ({"a": pool(1, 16)}, 1, 16),
        ({"a": pool(1, 8), "b": pool(1, 8)}, 1, 16),  # as many devices in fewer nodes
    ],
)
def test_a_mixed_partition_gives_the_nodes_that_suit(
    config: Config, pools: dict[str, PoolConfig], nodes: int, width: int
) -> None:
    config, partitions = replace(config, pools=pools), parse_partitions(MIXED)
    assert slurm.problems(config, slurm.SlurmOptions(), partitions) == ()
    served, found = slurm.nodes_of_job(config, slurm.SlurmOptions(), partitions)
    assert (len(served), found) == (nodes, width)
    too_many = replace(config, pools={"a": pool(101, 8)})
    assert slurm.problems(too_many, slurm.SlurmOptions(devices_per_node=8), parse_partitions(MIXED)) == ()
    (line,) = slurm.problems(replace(config, pools={"a": pool(102, 8)}), slurm.SlurmOptions(), partitions)
    assert line.startswith("pools: they need 102 nodes with 8 GPUs, partition gpu has 101: ")


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
    assert "error: --submit: no sbatch here: run/launch/job.sh is written" in capsys.readouterr().err
    (project.folder / "run/launch/job.sh").unlink()
    assert cli.main([*command, "run.steps=7"]) == 0
    out, err = capsys.readouterr()
    assert "sbatch run/launch/job.sh" in out and "warning: no sinfo here" in err
    assert "steps: 7" in (project.folder / "run/launch/job.sh").read_text()
    assert cli.main([*command, "roles.actor.tp=3"]) == 2
    assert "roles.actor.tp: 3 does not divide" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (["slurm"], "/proc/x: /proc is not writable: "),  # the run's own folder, which the check looks at
        (["kuberay", "--image=i", "--claim=c", "--mount=/m"], "/proc/x/launch cannot be written ("),
    ],
    ids=["slurm", "kuberay"],
)
def test_what_cannot_be_written_is_named(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: list[str], words: str
) -> None:
    monkeypatch.setenv("PATH", str(project.folder))
    assert cli.main(["launch", kind[0], "config.yaml", *kind[1:], "run.dir=/proc/x"]) == 2
    assert f"error: run.dir: {words}" in capsys.readouterr().err
    (project.folder / "file").touch()
    assert cli.main(["launch", kind[0], "config.yaml", *kind[1:], "--out=file/job"]) == 2
    assert "error: --out: file cannot be written (" in capsys.readouterr().err


def test_a_slurm_that_does_not_answer(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(project.folder))
    sinfo = project.folder / "sinfo"
    sinfo.write_text("#!/bin/sh\necho 'slurm_load_partitions: Unable to contact' >&2; exit 1\n")
    sinfo.chmod(0o755)
    assert cli.main(["launch", "slurm", "config.yaml"]) == 0
    assert "warning: slurm_load_partitions: Unable to contact: partition, time" in capsys.readouterr().err
    assert (project.folder / "run/launch/job.sh").is_file()
    (project.folder / "sbatch").symlink_to(sinfo)
    assert cli.main(["launch", "slurm", "config.yaml", "--submit", "--out=job.sh"]) == 1
    assert "error: --submit: sbatch did not take it, see above: job.sh is written" in capsys.readouterr().err
    # It is not even asked where the options are wrong.
    assert cli.main(["launch", "slurm", "config.yaml", "--time=soon", "--sbatch=exclude=n7"]) == 2
    err = capsys.readouterr().err
    assert "Unable" not in err and "error: --time: 'soon' is no time" in err
    assert "error: --sbatch: exclude=n7: " in err and "did you mean --sbatch=--exclude=n7?" in err


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


def test_a_kuberay_manifest_for_rdma(config: Config) -> None:
    options = KubeRayOptions(image="i", claim="c", mount="/m", resources={"rdma/hca": 8}, host_network=True)
    _, job = yaml.safe_load_all(manifest(config, options))
    cluster = job["spec"]["rayClusterSpec"]
    pods = [group["template"]["spec"] for group in cluster["workerGroupSpecs"]]
    for pod in pods:
        (container,) = pod["containers"]
        amounts = container["resources"]
        assert amounts["limits"]["rdma/hca"] == amounts["requests"]["rdma/hca"] == "8"
        assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    head = cluster["headGroupSpec"]["template"]["spec"]
    assert "rdma/hca" not in head["containers"][0]["resources"]["limits"]
    for pod in (head, *pods):
        assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")


def test_what_kubernetes_would_not_take(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    pools = {"train_a": pool(1, 1), "train-a": pool(1, 1)}
    config = replace(load_config("config.yaml", ["run.device=cuda"]), pools=pools)
    options = KubeRayOptions(image="i", claim="c", mount="/m", resources={"nvidia.com/gpu": 1})
    with pytest.raises(LaunchError) as failure:
        manifest(config, options)
    names, gpus = failure.value.problems
    assert names.startswith("pools.train-a: its worker group would have the name of that of pools.train_a, train-a, ")
    assert gpus.startswith("--resource: nvidia.com/gpu follows from pools.*.devices_per_node")
    command = ["launch", "kuberay", "config.yaml", "run.device=cuda", "--image=i", "--claim=c", "--mount=/m"]
    assert cli.main([*command, "--resource=rdma/hca=2", "--resource", "x=1"]) == 0
    with pytest.raises(SystemExit):
        cli.main([*command, "--resource=rdma/hca"])
    assert "'rdma/hca' is not NAME=N" in capsys.readouterr().err


def test_a_job_with_files_of_its_own(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["launch", "kuberay", "config.yaml", "--image=i", "--claim=c"]
    assert cli.main([*command, "--mount=/lab", "model=/lab/models/x", "data.train=/data/train.parquet"]) == 0
    out, err = capsys.readouterr()
    assert out == "kubectl apply -f run/launch/rayjob.yaml\n" and "error" not in err
    assert "warning: model: /lab/models/x: no such folder" in err
    assert "warning: data.train: /data/train.parquet: no such file" in err
    (outside,) = [line for line in err.splitlines() if "--mount" in line]
    assert outside.startswith("warning: data.train: /data/train.parquet is not under --mount /lab: ")
    assert cli.main([*command, "--mount=lab"]) == 2
    assert "error: --mount: lab: Kubernetes mounts at absolute paths: give /lab\n" in capsys.readouterr().err


def write_script(path: Path, text: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def start_node(tmp_path: Path, host: str, **more: str) -> tuple[int, str, str]:
    """node.sh on a pretended first node of two, whose name is ``host``'s: status, its log, and how Ray was started."""
    fakes = tmp_path / "bin"
    fakes.mkdir()
    write_script(fakes / "scontrol", f"echo 'NodeName=n1 NodeAddr={host} Port=1'")
    write_script(fakes / "hostname", 'echo "fe80::1 10.1.2.3 172.17.0.1 "')
    write_script(fakes / "ip", 'echo "3: ib0 inet 10.9.9.9/16 scope global ib0"')
    write_script(fakes / "getent", 'case $2 in n1) echo "127.0.1.1 STREAM n1";; *) echo "$2 STREAM";; esac')
    write_script(fakes / "python", f'env >"{tmp_path}/env"; echo "$*" >"{tmp_path}/started"')
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "config.yaml").touch()
    env = {
        **{"PATH": f"{fakes}:{os.environ['PATH']}", "SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "1", "SLURM_NODEID": "0"},
        **{"SLURM_NNODES": "2", "MEGAPPO_TMP": str(tmp_path), "MEGAPPO_RUN": str(tmp_path / "run")},
        **{"MEGAPPO_CONFIG": str(tmp_path / "config.yaml"), "MEGAPPO_HEAD_FILE": str(tmp_path / "head")},
        **{"MEGAPPO_PYTHON": str(fakes / "python"), "MEGAPPO_SETUP_FILE": "", "MEGAPPO_INTERFACE": "", **more},
        **{"MEGAPPO_NODE_POOLS": "train", "MEGAPPO_DEVICE": "cuda", "MEGAPPO_DEVICES_PER_NODE": "8"},
        **{"MEGAPPO_PORT": "20001", "MEGAPPO_NODE_TIMEOUT": "1"},
    }
    done = subprocess.run(["bash", str(ROOT / "launch/slurm/node.sh")], env=env, capture_output=True, timeout=30)
    started = tmp_path / "started"
    log = (tmp_path / "run/logs/node-n1.log").read_text()
    return done.returncode, log, started.read_text() if started.is_file() else ""


@pytest.mark.parametrize(
    ("host", "nodes", "address"), [("n1", "2", "10.1.2.3"), ("n1", "1", "127.0.1.1"), ("127.0.0.2", "2", "127.0.0.2")]
)
def test_a_node_does_not_announce_the_loopback(tmp_path: Path, host: str, nodes: str, address: str) -> None:
    _, log, started = start_node(tmp_path, host, SLURM_NNODES=nodes)
    assert f"--node-ip-address {address} " in started, log
    assert ("taking 10.1.2.3 (another: --interface)" in log) == (address == "10.1.2.3")


def test_an_interface_is_everybodys(tmp_path: Path) -> None:
    _, log, started = start_node(tmp_path, "n1", MEGAPPO_INTERFACE="ib0", GLOO_SOCKET_IFNAME="eth1")
    assert "--node-ip-address 10.9.9.9 " in started, log
    env = (tmp_path / "env").read_text().splitlines()
    assert {"NCCL_SOCKET_IFNAME==ib0", "GLOO_SOCKET_IFNAME=eth1"} <= set(env)


def test_what_a_submitted_job_gets_of_the_environment() -> None:
    ours = {"NCCL_IB_HCA": "mlx5", "GLOO_SOCKET_IFNAME": "ib0", "WANDB_PROJECT": "p", "MLFLOW_TRACKING_URI": "u"}
    ours |= {"PYTHONPATH": "/x", "OMP_NUM_THREADS": "1", "MEGAPPO_PIN_POOLS": "1", "TORCH_NCCL_BLOCKING_WAIT": "1"}
    assert job_environment({**ours, "HOME": "/h", "RAY_AUTH_TOKEN": "t", "MY_NCCL_": "x"}) == ours


@pytest.mark.parametrize("name", ["local.sh", "ray/submit.sh", "slurm/job.sh", "slurm/node.sh"])
def test_scripts_parse(name: str) -> None:
    path = ROOT / "launch" / name
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True).stderr == ""
    if name != "slurm/job.sh":  # a part of a script
        assert os.access(path, os.X_OK)
