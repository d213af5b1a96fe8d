"""Processes on the nodes of a run's pools that look around there, and measure what passes between them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import ray

from megappo.cluster.actors import LoggedProcess, timed
from megappo.cluster.calls import Calls, Place
from megappo.cluster.environment import worker_environment
from megappo.cluster.forks import Forks
from megappo.cluster.groups import Group, Member
from megappo.cluster.processes import Processes
from megappo.cluster.start import host_store
from megappo.config import Config
from megappo.doctor.facts import Facts, look
from megappo.doctor.findings import Link
from megappo.stack import Wanted, all_wanted

CPU_BYTES, CUDA_BYTES = 32 << 20, 1 << 30
"""Of one message: large enough that its rate is the link's."""
REPEATS = 3


class Probe(LoggedProcess):
    """One device of a pool, or all that a node's pool has."""

    @timed
    def look(self, run_dir: str, wanted: Sequence[Wanted]) -> Facts:
        """See :func:`megappo.doctor.facts.look`."""
        return look(run_dir, wanted)

    @timed
    def clock(self) -> float:
        """Unix seconds on this node."""
        return time.time()

    @timed
    def host_store(self, timeout_s: float) -> tuple[str, int]:
        """Open a meeting point; it lives as long as this process."""
        from megappo.reshard.gloo import host_store

        self._store = host_store(ray.util.get_node_ip_address(), timeout_s)
        return ray.util.get_node_ip_address(), self._store.port

    @timed
    def join(self, rank: int, world: int, host: str, port: int, timeout_s: float) -> str:
        """Join all others; returns the name of this process's device."""
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        timeout = timedelta(seconds=timeout_s)
        on_cuda = torch.cuda.is_available()
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        dist.init_process_group(
            "nccl" if on_cuda else "gloo", store=store, rank=rank, world_size=world, timeout=timeout
        )
        return torch.cuda.get_device_name() if on_cuda else "cpu"

    @timed
    def exchange(self, rank: int, other: int) -> float:
        """Send to, or receive from, another rank (the lower one sends); returns bytes a second."""
        import torch
        import torch.distributed as dist

        on_cuda = torch.cuda.is_available()
        size = CUDA_BYTES if on_cuda else CPU_BYTES
        data = torch.ones(size, dtype=torch.uint8, device="cuda" if on_cuda else "cpu")
        note = torch.zeros(1, device=data.device)
        times = []
        for _ in range(REPEATS + 1):  # the first also connects
            began = time.perf_counter()
            if rank < other:
                dist.send(data, other)
                dist.recv(note, other)  # it has all come
            else:
                dist.recv(data, other)
                dist.send(note, other)
            note.item()
            times.append(time.perf_counter() - began)
        return size / min(times[1:])


@dataclass(frozen=True)
class Examined:
    """What was found.

    Attributes:
        nodes, skews: of :func:`megappo.doctor.findings.findings`.
        pools: that each of the nodes serves.
        links: measured ones.
    """

    nodes: dict[str, Facts]
    skews: dict[str, float]
    pools: dict[str, tuple[str, ...]]
    links: list[Link]


@dataclass(frozen=True)
class Seat:
    """A process: which of a pool's devices it has."""

    pool: str
    node: int
    device: int


def seats(config: Config) -> list[Seat]:
    """The first and the last device of each node of each pool."""
    return [
        Seat(name, node, device)
        for name, pool in config.pools.items()
        for node in range(pool.nodes)
        for device in sorted({0, pool.devices_per_node - 1})
    ]


def pairs(found: Sequence[Seat]) -> Iterator[tuple[int, int]]:
    """Those that messages pass between: inside each node, along each pool's nodes, and from pool to pool."""
    first = {(seat.pool, seat.node): at for at, seat in reversed(list(enumerate(found)))}
    for (at, a), (to, b) in combinations(enumerate(found), 2):
        neighbours = a.pool == b.pool and b.node - a.node == 1
        heads = a.pool != b.pool and a.node == b.node == 0
        same_node = a.pool == b.pool and a.node == b.node
        both_first = first[a.pool, a.node] == at and first[b.pool, b.node] == to
        if same_node or ((neighbours or heads) and both_first):
            yield at, to


def examine(config: Config) -> Examined:
    """Start processes on the nodes of all pools, as a run would, look, and measure one link after the other.

    Raises:
        PoolError: the cluster lacks devices.
        WorkerFailed: a process failed or did not answer.
    """
    limit_s = min(config.run.timeout_s, 600.0)
    with Forks(config) as forks, Processes(config, forks) as on_ray:
        calls, taken = Calls(limit_s), seats(config)
        probes = Group(tuple(_start(config, on_ray, seat) for seat in taken), calls)
        wanted = all_wanted(config.run.device)
        (found,) = calls.gather(probes.each("whereabouts", lambda _: ()))
        on_ray.started.extend(address for address, _ in found)
        addresses = [address.host for address in on_ray.started]
        names = {seat: f"node {address}" for seat, address in zip(taken, addresses, strict=True)}
        serving: dict[str, list[str]] = {}
        for seat, name in names.items():
            serving.setdefault(name, []).append(seat.pool)
        once_each = {name: tuple(dict.fromkeys(pools)) for name, pools in serving.items()}
        titles = {name: f"{name} ({', '.join(pools)})" for name, pools in once_each.items()}
        once = {name: at for at, name in reversed(list(enumerate(names.values())))}
        nodes, skews = {}, {}
        for name, at in once.items():  # one after the other: they may write to the same disk
            alone = Group(probes.members[at : at + 1], calls)
            ((nodes[titles[name]],),) = calls.gather(alone.each("look", lambda _: (str(config.run.folder), wanted)))
            asked = time.time()
            ((clock,),) = calls.gather(alone.each("clock", lambda _: ()))
            skews[titles[name]] = clock - (asked + time.time()) / 2
        pools = {titles[name]: there for name, there in once_each.items()}
        return Examined(nodes, skews, pools, _measure(probes, taken, addresses, limit_s))


def _measure(probes: Group, taken: Sequence[Seat], addresses: Sequence[str], limit_s: float) -> list[Link]:
    calls, world = probes.calls, len(taken)
    if world < 2:
        return []
    ((host, port),) = calls.gather(host_store(probes, limit_s))
    (devices,) = calls.gather(probes.each("join", lambda rank: (rank, world, host, port, limit_s)))
    links = []
    for at, to in pairs(taken):
        ranks = ((at, to), (to, at))
        two = Group((probes.members[at], probes.members[to]), calls)
        (rates,) = calls.gather(two.each("exchange", ranks.__getitem__))
        a, b = taken[at], taken[to]
        across = addresses[at] != addresses[to]
        link = "nodes" if across else "devices of a node" if devices[at] != "cpu" else "processes of a node"
        where = f"inside {a.pool}" if a.pool == b.pool else f"{a.pool} to {b.pool}"
        links.append(Link(f"{where}, between {link} ({_ends(addresses, at, to)})", min(rates), across, devices[at]))
    return links


def _ends(addresses: Sequence[str], at: int, to: int) -> str:
    return " and ".join(dict.fromkeys((addresses[at], addresses[to])))


def _start(config: Config, on_ray: Processes, seat: Seat) -> Member:
    pool = on_ray.pools[seat.pool]
    log = str((config.run.folder / "logs" / f"doctor-{seat.pool}-{seat.node}-{seat.device}.log").resolve())
    index = seat.node * pool.config.devices_per_node + seat.device
    environment = worker_environment(config)
    actor: Any = pool.start(Probe, index, 1, log, environment=environment, python=on_ray.pythons.roles)
    return Member(actor, Place(f"probe of {seat.pool}", index, seat.pool, "?", log))
