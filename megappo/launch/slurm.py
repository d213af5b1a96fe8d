"""A Slurm batch script from a configuration: one job with a Ray cluster of its own."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megappo.cluster.node_names import PIN_POOLS
from megappo.config import Config, dump_config
from megappo.launch.partitions import Partition, duration_s
from megappo.launch.problems import LaunchError
from megappo.layout.placement import place_pools
from megappo.plan.estimate import estimate, full_workload, on_nodes
from megappo.plan.limits import WRITE_RATE, checkpoint_bytes, round_up
from megappo.plan.memory import fit_problems
from megappo.plan.profile import load_profile
from megappo.plan.sync import rough_sync

SCRIPTS = Path(__file__).resolve().parents[2] / "launch" / "slurm"
SIGNAL_S = 65535
"""The longest time before a job's limit at which sbatch sends a signal."""
LOCAL_FILE_SYSTEMS = {"btrfs", "ext2", "ext3", "ext4", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """What the configuration does not say.

    Attributes:
        devices_per_node: None: those of the partition's nodes of which enough are there and the fewest devices idle,
            or of the widest pool.
        time: as Slurm writes it.
        checkpoint_before_s: seconds before the time limit at which the run is asked to stop after its step.
        node_timeout_s: seconds that nodes may take to come.
        setup: shell file that every node sources first (modules, proxies).
        interface: network interface whose address nodes use; empty: the address by which Slurm knows them. NCCL and
            gloo take it for their sockets too, unless ``NCCL_SOCKET_IFNAME`` or ``GLOO_SOCKET_IFNAME`` say otherwise.
        sbatch: further arguments of sbatch.
    """

    devices_per_node: int | None = None
    time: str = "24:00:00"
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    checkpoint_before_s: int = 900
    node_timeout_s: int = 300
    setup: str = ""
    interface: str = ""
    sbatch: tuple[str, ...] = ()


def problems(config: Config, options: SlurmOptions, partitions: Mapping[str, Partition] | None) -> tuple[str, ...]:
    """Everything that would keep the job from starting, one line each, with its fix."""
    return tuple(_problems(config, options, partitions))


def _problems(config: Config, options: SlurmOptions, partitions: Mapping[str, Partition] | None) -> Iterator[str]:
    limit_s: float | None = None
    try:
        limit_s = duration_s(options.time)
    except ValueError as error:
        yield f"--time: {error}"
    if limit_s and options.checkpoint_before_s >= limit_s:
        yield (
            f"--checkpoint-before: {options.checkpoint_before_s} s is not less than the {limit_s:g} s of --time: "
            "lower it (it must hold one step and one checkpoint), or raise --time"
        )
    if options.checkpoint_before_s > SIGNAL_S:
        yield (
            f"--checkpoint-before: {options.checkpoint_before_s} s is more than the {SIGNAL_S} s that sbatch's "
            "--signal knows: lower it"
        )
    if options.setup and not Path(options.setup).is_file():
        yield f"--setup: {options.setup}: no such file: name a shell file that all nodes see"
    for argument in options.sbatch:
        if not argument.startswith("-"):
            yield f"--sbatch: {argument}: sbatch's options begin with dashes: did you mean --sbatch=--{argument}?"
    if not (SCRIPTS / "job.sh").is_file():
        yield f"{SCRIPTS}: has no job.sh: install megappo from its repository (pip install -e), where launch/ is"
    for key in config.pools:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", key):
            yield f"pools.{key}: nodes announce the pools they serve by name: use only letters, digits, _ . and -"
    partition = None
    if partitions is not None:
        partition = _partition(options.partition, partitions)
        known = ", ".join(partitions) or "none"
        if options.partition and partition is None:
            yield f"--partition: {options.partition} does not exist: partitions are {known}"
        elif partition is None:
            yield f"--partition: none given, and none is the default here: partitions are {known}"
    if partition and limit_s and limit_s > partition.limit_s:
        yield (
            f"--time: {options.time} is more than the {partition.limit_s / 3600:g} h that partition {partition.name} "
            "allows: lower it; the run goes on in a next job"
        )
    yield from _node_problems(config, options, partition)


def _node_problems(config: Config, options: SlurmOptions, partition: Partition | None) -> Iterator[str]:
    width = _devices_per_node(config, options, partition)
    where = f"--devices-per-node is {width}" if options.devices_per_node else f"the largest nodes have {width}"
    wide = False
    for name, pool in config.pools.items():
        if pool.devices_per_node > width:
            wide = True
            yield (
                f"pools.{name}.devices_per_node: {pool.devices_per_node} does not fit on a node ({where}): spread the "
                f"pool over more nodes, for instance {_spread(pool.devices, width)}, or take larger nodes (--partition)"
            )
    if partition is None:
        return
    if config.run.device == "cuda":
        fitting = _count(partition, width)
        kind = f"nodes with {width} GPUs"
    else:
        fitting, kind = sum(kind.count for kind in partition.kinds), "nodes"
    needed = 0 if wide else len(place_pools(config.pools, width))
    if config.run.device == "cuda" and not fitting:
        most = max((kind.gpus for kind in partition.kinds), default=0)
        yield (
            f"--devices-per-node: no node of partition {partition.name} has {width} GPUs, the largest has {most}: "
            "lower it, or choose another --partition"
        )
    elif needed > fitting:
        yield (
            f"pools: they need {needed} {kind}, partition {partition.name} has {fitting}: make them smaller, or choose "
            "another --partition"
        )


def _spread(devices: int, width: int) -> str:
    each = max(size for size in range(1, width + 1) if devices % size == 0)
    return f"{{nodes: {devices // each}, devices_per_node: {each}}}"


def _partition(name: str, partitions: Mapping[str, Partition] | None) -> Partition | None:
    if name:
        return (partitions or {}).get(name)
    return next((partition for partition in (partitions or {}).values() if partition.default), None)


def nodes_of_job(
    config: Config, options: SlurmOptions, partitions: Mapping[str, Partition] | None
) -> tuple[tuple[tuple[str, ...], ...], int]:
    """(The pools of each node, the devices of every node)."""
    width = _devices_per_node(config, options, _partition(options.partition, partitions))
    return place_pools(config.pools, width), width


def _devices_per_node(config: Config, options: SlurmOptions, partition: Partition | None) -> int:
    if options.devices_per_node:
        return options.devices_per_node
    widest = max(pool.devices_per_node for pool in config.pools.values())
    if config.run.device != "cuda" or partition is None:
        return widest
    widths = sorted({kind.gpus for kind in partition.kinds if kind.gpus}, reverse=True)
    needed = {width: len(place_pools(config.pools, width)) for width in widths if width >= widest}
    enough = [width for width, nodes in needed.items() if nodes <= _count(partition, width)]
    if enough:  # of as many devices in all: fewer, wider nodes
        return min(enough, key=lambda width: needed[width] * width)
    return min(needed, default=max(widths, default=widest))


def _count(partition: Partition, width: int) -> int:
    """Nodes with at least so many GPUs."""
    return sum(kind.count for kind in partition.kinds if kind.gpus >= width)


def warnings(config: Config, options: SlurmOptions, nodes: int, width: int) -> Iterator[str]:
    """What will not keep the job from starting, but may hurt."""
    if config.run.save_every == 0 and config.run.steps > 1 and config.run.keep_best is None:
        yield (
            "run.save_every: 0: where a node fails, Slurm puts the job back into the queue, and it begins at the first "
            "step: give run.save_every"
        )
    yield from _end_warnings(config, options)
    idle = nodes * width - sum(pool.devices for pool in config.pools.values())
    if idle and config.run.device == "cuda":
        yield f"pools: {idle} of the {nodes * width} GPUs of the job's {nodes} nodes are in no pool and stay idle"
    if nodes > 1 and (kind := file_system(config.run.folder)) in LOCAL_FILE_SYSTEMS:
        yield (
            f"run.dir: {os.path.abspath(config.run.folder)} is on a {kind} file system, which other nodes hardly see: "
            "choose a folder that all nodes share"
        )


def _end_warnings(config: Config, options: SlurmOptions) -> Iterator[str]:
    """Whether a step and a checkpoint come to an end between the signal and the time limit."""
    if config.run.device != "cuda":
        return
    device = on_nodes(config, load_profile(config.run.device_profile))
    if fit_problems(config, device):
        return
    step_s = estimate(config, device, full_workload(config), rough_sync(config, device)).seconds
    size = checkpoint_bytes(config)
    save_s = size / WRITE_RATE
    if options.checkpoint_before_s < step_s + save_s:
        yield (
            f"--checkpoint-before: {options.checkpoint_before_s} s is less than the {step_s:.0f} s predicted for a "
            f"step and {save_s:.0f} s for a checkpoint of {size / 1e9:.0f} GB at {WRITE_RATE / 1e9:g} GB/s (megappo "
            f"doctor measures it): give {round_up(1.25 * step_s + save_s)}, or Slurm may end the run before it is done"
        )


def file_system(path: Path) -> str:
    """Type of the file system that holds a path; empty where Linux does not say."""
    best, found = "", ""
    resolved = str(path.resolve())
    try:
        mounts = Path("/proc/self/mounts").read_text()
    except OSError:
        return ""
    for line in mounts.splitlines():
        _, point, kind, *_ = line.split(" ")
        inside = resolved == point or resolved.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):  # the later of two hides the earlier
            best, found = point, kind
    return found


def batch_script(config: Config, options: SlurmOptions, partitions: Mapping[str, Partition] | None) -> str:
    """The whole script; it does not change when the configuration file does.

    Raises:
        LaunchError: the job could not start.
    """
    if found := problems(config, options, partitions):
        raise LaunchError(found)
    nodes, width = nodes_of_job(config, options, partitions)
    run = os.path.abspath(config.run.folder)
    directives = {
        "job-name": f"megappo-{Path(run).name}",
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "constraint": options.constraint,
        "nodes": str(len(nodes)),
        "ntasks-per-node": "1",
        "gpus-per-node": str(width) if config.run.device == "cuda" else "",
        "mem": "0",
        "time": options.time,
        "signal": f"B:USR1@{options.checkpoint_before_s}",
        "open-mode": "append",
        "chdir": os.getcwd(),
        "output": f"{run}/logs/slurm-%j.log",
    }
    lines = [f"#SBATCH --{name}={_quoted(value)}" for name, value in directives.items() if value]
    lines += ["#SBATCH --exclusive", "#SBATCH --requeue", *(f"#SBATCH {argument}" for argument in options.sbatch)]
    variables = {
        "MEGAPPO_PYTHON": sys.executable,
        "MEGAPPO_SCRIPTS": str(SCRIPTS),
        "MEGAPPO_RUN": run,
        "MEGAPPO_DEVICE": config.run.device,
        "MEGAPPO_DEVICES_PER_NODE": str(width),
        "MEGAPPO_NODE_POOLS": "\n".join(" ".join(pools) for pools in nodes),
        "MEGAPPO_NODE_TIMEOUT": str(options.node_timeout_s),
        "MEGAPPO_SETUP_FILE": os.path.abspath(options.setup) if options.setup else "",
        "MEGAPPO_INTERFACE": options.interface,
        PIN_POOLS: "1",
    }
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    return "\n".join(
        (
            "#!/usr/bin/env bash",
            "# Written by `megappo launch slurm`. Submit it with sbatch; again, to go on from the last checkpoint.",
            *lines,
            "",
            *exports,
            "read_config() { cat <<'END_OF_CONFIG'",
            dump_config(config).rstrip("\n"),
            "END_OF_CONFIG",
            "}",
            "",
            (SCRIPTS / "job.sh").read_text(encoding="utf-8"),
        )
    )


def _quoted(value: str) -> str:
    """sbatch's directives know double quotes."""
    return f'"{value}"' if re.search(r"\s", value) else value
