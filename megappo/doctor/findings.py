"""What of the facts will hurt, and the fix of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megappo.doctor.facts import GIB, Facts
from megappo.layout.devices import known_profile
from megappo.plan.limits import MARGIN, round_up

OPEN_FILES, OPEN_FILES_ALONE = 65536, 8192
"""What Ray asks for, as each worker, and each connection between nodes, takes some; what does on one node."""
RAY_STORE, RAY_STORE_MOST = 0.3, 200e9
"""Part of a node's memory that Ray takes for its object store, in ``/dev/shm`` if there is room; bytes at most."""
LOCKED_MEMORY = 16 * GIB
"""What network cards may well read and write of a process: NCCL locks megabytes for every peer and channel."""
SKEW_S = 1.0
SLOW = 0.5
"""Part of the usual rate below which a link is slower than it should be."""
PATIENCE_S = 300.0
"""How long writing a checkpoint may take."""


@dataclass(frozen=True)
class Link:
    """What passes between two devices.

    Attributes:
        between: who, in words.
        rate: bytes a second, one way.
        across: whether they are on two nodes.
        device: name of the devices, "cpu" for processes.
    """

    between: str
    rate: float
    across: bool
    device: str


@dataclass(frozen=True)
class Needs:
    """What a run wants of its nodes.

    Attributes:
        checkpoint: bytes of one.
        kept: checkpoints that lie in the run's folder at most.
        call_s: seconds that writing one may take (``run.timeout_s``).
        host: bytes of memory, by node, for what is offloaded.
    """

    checkpoint: int = 0
    kept: int = 1
    call_s: float = float("inf")
    host: Mapping[str, int] = field(default_factory=dict)


def findings(nodes: Mapping[str, Facts], skews: Mapping[str, float], needs: Needs) -> Iterator[str]:
    """What will hurt, one line each: ``where: what: fix``.

    Args:
        nodes: by name, with the pools they serve.
        skews: seconds that a node's clock is ahead of this one's.
    """
    for name, facts in nodes.items():
        yield from (f"{name}: {line}" for line in _of_node(facts, needs, alone=len(nodes) == 1))
        if (waiting := needs.host.get(name, 0)) > facts.memory:
            yield (
                f"{name}: host memory: {facts.memory / GIB:.0f} GiB, and what is offloaded and saved takes "
                f"{waiting / GIB:.0f}: offload less (roles.*.offload; megappo plan says what takes how much), or "
                "take nodes with more"
            )
        if abs(skews.get(name, 0.0)) > SKEW_S:
            yield (
                f"{name}: its clock is {skews[name]:+.1f} s off, so that times in the log and the report are wrong: "
                "synchronise it (chronyc tracking, timedatectl)"
            )
    for what, kinds in (("devices", _kinds(nodes)), ("versions", _versions(nodes))):
        if len(kinds) > 1:
            listed = "; ".join(f"{kind} on {', '.join(names)}" for kind, names in kinds.items())
            yield f"nodes differ in {what}: {listed}: use nodes of one kind and one environment for all"


def slow_links(links: Sequence[Link]) -> Iterator[str]:
    """Links that are slower than such devices' usually are."""
    for link in links:
        profile = known_profile(link.device)
        if profile is None:
            continue
        usual = profile.link(link.across)
        if link.rate < SLOW * usual:
            fix = (
                "see that NCCL uses the fast network (NCCL_SOCKET_IFNAME, NCCL_IB_HCA; NCCL_DEBUG=INFO tells)"
                if link.across
                else "see whether peer-to-peer works (nvidia-smi topo -m; unset NCCL_P2P_DISABLE)"
            )
            yield f"{link.between}: {link.rate / 1e9:.1f} GB/s where {usual / 1e9:.0f} are usual: {fix}"


def _of_node(facts: Facts, needs: Needs, *, alone: bool) -> Iterator[str]:
    yield from facts.lacking
    total, free = facts.shared_memory
    store = min(RAY_STORE * facts.memory, RAY_STORE_MOST)
    if total < store:
        yield (
            f"/dev/shm: {total / GIB:.1f} GiB, where Ray wants {store / GIB:.0f} GiB for its objects, which will go "
            f"through the disk instead: mount it larger (docker run --shm-size={store / GIB:.0f}g)"
        )
    elif free < store / 2:
        yield f"/dev/shm: only {free / GIB:.1f} of {total / GIB:.1f} GiB are free: remove what others left there"
    soft, hard = facts.open_files
    if soft < (OPEN_FILES_ALONE if alone else OPEN_FILES):
        fix = f"ulimit -n {OPEN_FILES} in the job" if hard >= OPEN_FILES else "have LimitNOFILE raised for jobs"
        yield f"open files: {soft}, of which Ray and NCCL run out; {OPEN_FILES} are usual: {fix}"
    locked, most = facts.locked_memory
    if not alone and facts.devices and locked is not None and locked < LOCKED_MEMORY:
        fix = (
            'ulimit -l "$(ulimit -Hl)" in the job'
            if most is None or most > locked
            else "have LimitMEMLOCK=infinity set for Slurm's or Ray's daemon"
        )
        yield f"locked memory: {locked / GIB:.2g} GiB, more of which InfiniBand asks for; unlimited is usual: {fix}"
    for at, device in enumerate(facts.devices):
        if device.free < 0.95 * device.total:
            taken = (device.total - device.free) / GIB
            fix = "end them (nvidia-smi), or ask for whole nodes"
            yield f"device {at}: {taken:.1f} GiB are taken by other processes: {fix}"
    if facts.write_rate is None:
        yield "run.dir: nothing can be written there: choose another, which all nodes see"
    elif needs.checkpoint:
        seconds = needs.checkpoint / facts.write_rate
        if seconds > PATIENCE_S:
            yield (
                f"run.dir: {facts.write_rate / 1e6:.0f} MB/s, so that a checkpoint of {needs.checkpoint / 1e9:.0f} GB "
                f"takes {seconds / 60:.0f} min if one node writes it: choose a faster file system, or save less often"
            )
        if MARGIN * seconds > needs.call_s:
            yield (
                f"run.timeout_s: {needs.call_s:g} s is less than twice the {seconds:.0f} s that a checkpoint takes if "
                f"one node writes it: give {round_up(MARGIN * seconds)}"
            )
        room = needs.checkpoint * (needs.kept + 1)
        if facts.disk_free < room:
            yield (
                f"run.dir: {facts.disk_free / 1e9:.0f} GB are free, {needs.kept + 1} checkpoints take "
                f"{room / 1e9:.0f}: make room, or lower run.keep_checkpoints"
            )


def _kinds(nodes: Mapping[str, Facts]) -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for name, facts in nodes.items():
        for kind in {device.name for device in facts.devices}:
            out.setdefault(kind, []).append(name)
    return out


def _versions(nodes: Mapping[str, Facts]) -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for name, facts in nodes.items():
        out.setdefault(", ".join(f"{package} {found}" for package, found in facts.versions.items()), []).append(name)
    return out
