"""``megappo doctor``: look at this machine, or at all nodes of a run's pools, and say what will hurt."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megappo.check import check_file
from megappo.config import Config

BAD_INPUT = 2
FOUND = 1
"""Exit status where something will hurt."""


def add_doctor(commands: Any) -> None:
    """Add the command to the parser."""
    text = "what of this machine, or of the nodes of an allocation, will hurt a run; exit 1 if anything"
    command = commands.add_parser("doctor", help=text, description=text)
    text = "look at all nodes of its pools, through RAY_ADDRESS or a Ray of its own, and at what passes between them"
    command.add_argument("config", metavar="CONFIG", nargs="?", help=text)
    command.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="for instance run.device=cpu")
    command.add_argument("--measure-device", metavar="FILE", help="measure a profile for plan --device FILE.yaml")
    command.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    if options.measure_device:
        if options.config is not None:
            print(f"error: --measure-device: takes no CONFIG ({options.config}): leave one out", file=sys.stderr)
            return BAD_INPUT
        return _measure(Path(options.measure_device))
    if options.config is None:
        return _this_machine()
    config, report = check_file(options.config, options.overrides, planning=True)
    if config is None or report.errors:
        print("\n".join(f"error: {line}" for line in report.errors), file=sys.stderr)
        return BAD_INPUT
    return _allocation(config)


def _measure(file: Path) -> int:
    if file.suffix not in (".yaml", ".yml") or not file.absolute().parent.is_dir():
        print(f"error: --measure-device: {file}: give a .yaml file in a folder that is there", file=sys.stderr)
        return BAD_INPUT
    from megappo.doctor.measure import measure_device, write_profile

    profile = measure_device()
    write_profile(file, profile)
    for name, value in profile.items():
        if name != "sources":
            source = profile["sources"].get(name, "")
            print(f"{name:<17}  {value}" + (f"  ({source})" if source else ""))
    print(f"{file}: for megappo plan --device {file}")
    return 0


def _this_machine() -> int:
    from megappo.doctor.facts import look
    from megappo.doctor.findings import Needs, findings
    from megappo.stack import all_wanted, problems

    device = "cpu" if not problems(all_wanted("cpu")) else "cuda"
    facts = look(os.getcwd(), all_wanted(device))
    nodes = {facts.host: facts}
    print("\n".join(node_lines(nodes, {})))
    return _verdict(findings(nodes, {}, Needs()))


def _allocation(config: Config) -> int:
    from megappo.doctor.findings import Needs, findings, slow_links
    from megappo.doctor.probes import examine
    from megappo.fit.host import host_bytes
    from megappo.plan.limits import checkpoint_bytes

    began = time.monotonic()
    found = examine(config)
    print("\n".join(node_lines(found.nodes, found.skews)))
    if found.links:
        print("\nlinks, one way")
        for link in found.links:
            print(f"  {link.rate / 1e9:8.2f} GB/s  {link.between}")
    print(f"looked at in {time.monotonic() - began:.0f} s")
    waiting = host_bytes(config) if config.run.device == "cuda" else {}
    needs = Needs(
        checkpoint=checkpoint_bytes(config),
        kept=config.run.keep_checkpoints,
        call_s=config.run.timeout_s,
        host={node: sum(waiting.get(pool, 0) for pool in pools) for node, pools in found.pools.items()},
    )
    return _verdict([*findings(found.nodes, found.skews, needs), *slow_links(found.links)])


def node_lines(nodes: Any, skews: Any) -> Iterator[str]:
    """What there is on each node, for people."""
    gib = 1 << 30
    for name, facts in nodes.items():
        yield name
        yield "  " + ", ".join(f"{package} {version}" for package, version in facts.versions.items())
        shared = f"/dev/shm {facts.shared_memory[1] / gib:.1f} of {facts.shared_memory[0] / gib:.1f} GiB free"
        locked = "unlimited" if facts.locked_memory[0] is None else f"{facts.locked_memory[0] / gib:.2g} GiB"
        yield (
            f"  {facts.cores} cores, {facts.memory / gib:.0f} GiB, {shared}, {facts.open_files[0]} open files, locked "
            f"memory {locked}"
        )
        for at, device in enumerate(facts.devices):
            yield f"  device {at}: {device.name}, {device.free / gib:.1f} of {device.total / gib:.1f} GiB free"
        rate = "cannot be written" if facts.write_rate is None else f"{facts.write_rate / 1e6:.0f} MB/s to the disk"
        skew = f", clock {skews[name]:+.3f} s" if name in skews else ""
        yield f"  run folder: {rate}, {facts.disk_free / 1e9:.0f} GB free{skew}"


def _verdict(found: Any) -> int:
    lines = list(found)
    print()
    for line in lines:
        print(f"will hurt: {line}")
    print(f"{len(lines)} found" if lines else "nothing found that would hurt")
    return FOUND if lines else 0
