"""``megappo launch``: check, then write (and submit) a job."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from megappo.check import check_file
from megappo.config import Config
from megappo.launch.problems import LaunchError

BAD_INPUT = 2


def add_launch(commands: Any) -> None:
    """Add the command to the parser."""
    text = "write a cluster job from a configuration, after checking it"
    kinds = commands.add_parser("launch", help=text, description=text).add_subparsers(metavar="KIND", required=True)
    text = "write a Slurm batch script with a Ray cluster of its own; the job resumes and requeues itself"
    command = kinds.add_parser("slurm", help=text, description=text)
    _common(command, _slurm)
    command.add_argument("--submit", action="store_true", help="submit it with sbatch")
    command.set_defaults(interrupted="if it was to be submitted, squeue --me says whether it was")
    command.add_argument(
        "--devices-per-node", type=_positive, metavar="N", help="default: by the partition's nodes and the pools"
    )
    command.add_argument("--time", default="24:00:00", metavar="T", help="limit of one job (default 24:00:00)")
    for name in ("partition", "account", "qos", "constraint"):
        command.add_argument(f"--{name}", default="", metavar="X", help="as sbatch has it")
    text = "checkpoint so long before the limit; must hold a step and a checkpoint (default 900)"
    command.add_argument("--checkpoint-before", type=_positive, default=900, metavar="S", help=text)
    text = "how long nodes may take to come (default 300)"
    command.add_argument("--node-timeout", type=_positive, default=300, metavar="S", help=text)
    command.add_argument("--setup", default="", metavar="FILE", help="shell file that every node sources first")
    command.add_argument(
        "--interface", default="", metavar="IF", help="network of Ray, NCCL and gloo, for instance ib0"
    )
    text = "a further argument of sbatch, for instance --sbatch=--exclude=n7; may be repeated"
    command.add_argument("--sbatch", action="append", default=[], metavar="ARG", help=text)

    text = "write a KubeRay manifest: a RayJob with a worker group for each pool"
    command = kinds.add_parser("kuberay", help=text, description=text)
    _common(command, _kuberay)
    command.add_argument("--image", required=True, help="container image with megappo installed")
    command.add_argument("--claim", required=True, metavar="PVC", help="volume claim that all pods share")
    command.add_argument("--mount", required=True, metavar="DIR", help="where it is mounted; the working directory")
    command.add_argument("--cpus-per-device", type=_positive, default=8, metavar="N")
    command.add_argument("--memory-gib-per-device", type=_positive, default=96, metavar="N")
    text = "a further resource of every pod with devices, for instance rdma/hca=8; may be repeated"
    command.add_argument("--resource", type=_resource, action="append", default=[], metavar="NAME=N", help=text)
    text = "pods use their node's network as it is (hostNetwork); one pod a node then"
    command.add_argument("--host-network", action="store_true", help=text)


def _common(command: argparse.ArgumentParser, run: Any) -> None:
    command.add_argument("config", metavar="CONFIG", help="YAML file")
    command.add_argument(
        "overrides", metavar="key=value", nargs="*", default=[], help="for instance roles.rollout.tp=2"
    )
    command.add_argument("--out", metavar="FILE", help="where to write it (default: in RUN/launch)")
    command.set_defaults(run=run)


def _slurm(options: argparse.Namespace) -> int:
    from megappo.launch.partitions import SlurmUnavailable, read_partitions
    from megappo.launch.slurm import SlurmOptions, batch_script, nodes_of_job, problems, warnings

    config = _checked(options)
    if config is None:
        return BAD_INPUT
    chosen = SlurmOptions(
        **{name: getattr(options, name) for name in ("devices_per_node", "time", "partition", "account", "qos")},
        constraint=options.constraint,
        checkpoint_before_s=options.checkpoint_before,
        node_timeout_s=options.node_timeout,
        setup=options.setup,
        interface=options.interface,
        sbatch=tuple(options.sbatch),
    )
    if found := problems(config, chosen, None):  # Slurm may take half a minute to say nothing
        raise LaunchError(found)
    partitions = None
    try:
        partitions = read_partitions()
    except SlurmUnavailable as error:
        print(f"warning: {error}: partition, time limit and nodes were not compared with Slurm", file=sys.stderr)
    script = batch_script(config, chosen, partitions)
    nodes, width = nodes_of_job(config, chosen, partitions)
    for line in warnings(config, chosen, len(nodes), width):
        print(f"warning: {line}", file=sys.stderr)
    path = _write(options.out, config.run.folder / "launch" / "job.sh", script)
    _make(config.run.folder / "logs")  # Slurm does not
    for index, pools in enumerate(nodes):
        print(f"node {index}: {', '.join(pools)}")
    if not options.submit:
        print(f"sbatch {path}")
        return 0
    if shutil.which("sbatch") is None:
        print(f"error: --submit: no sbatch here: {path} is written: sbatch it on a login node", file=sys.stderr)
        return BAD_INPUT
    status = subprocess.run(["sbatch", str(path)]).returncode
    if status:
        print(f"error: --submit: sbatch did not take it, see above: {path} is written", file=sys.stderr)
    return status


def _kuberay(options: argparse.Namespace) -> int:
    from megappo.launch.kuberay import KubeRayOptions, manifest, warnings

    config = _checked(options, elsewhere=True)
    if config is None:
        return BAD_INPUT
    names = ("image", "claim", "mount", "cpus_per_device", "memory_gib_per_device", "host_network")
    chosen = KubeRayOptions(**{name: getattr(options, name) for name in names}, resources=dict(options.resource))
    text = manifest(config, chosen)
    for line in warnings(config, chosen):
        print(f"warning: {line}", file=sys.stderr)
    print(f"kubectl apply -f {_write(options.out, config.run.folder / 'launch' / 'rayjob.yaml', text)}")
    return 0


def _checked(options: argparse.Namespace, *, elsewhere: bool = False) -> Config | None:
    """The configuration, if it has no errors; findings are on standard error.

    Args:
        elsewhere: its files are where the job will run, and may be missing here.
    """
    config, report = check_file(options.config, options.overrides, elsewhere=elsewhere)
    for kind, lines in (("warning", report.warnings), ("error", report.errors)):
        for line in lines:
            print(f"{kind}: {line}", file=sys.stderr)
    return None if report.errors else config


def _write(out: str | None, default: Path, text: str) -> Path:
    """Write the file that ``--out`` names, or the one in the run's folder."""
    target = Path(out) if out else default
    _make(target.parent, "--out" if out else "run.dir")
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LaunchError(_unwritable("--out" if out else "run.dir", target, error)) from None
    return target


def _make(folder: Path, key: str = "run.dir") -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(_unwritable(key, folder, error)) from None


def _unwritable(key: str, path: Path, error: OSError) -> tuple[str]:
    return (f"{key}: {path} cannot be written ({error.strerror}): choose another",)


def _resource(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    if not name or not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=N, for instance rdma/hca=8")
    return name, int(number)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)
