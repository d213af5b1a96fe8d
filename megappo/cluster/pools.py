"""Pools: named sets of devices, reserved as Ray placement groups, and the processes that run on them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megappo.cluster.environment import has_own_ray
from megappo.cluster.node_names import PIN_POOLS, pool_resource
from megappo.config import Devices, PoolConfig


class PoolError(RuntimeError):
    """The cluster does not have the devices that a pool asks for."""


@dataclass(frozen=True)
class Pool:
    """A reserved pool.

    Attributes:
        name, config: as the user wrote them.
        on_cuda: whether its devices are GPUs; else they are CPU processes.
        reservation: one bundle a node.
    """

    name: str
    config: PoolConfig
    on_cuda: bool
    reservation: PlacementGroup

    def start(
        self,
        actor: type,
        index: int,
        devices: int,
        *args: Any,
        environment: Mapping[str, str],
        python: str | None = None,
    ) -> Any:
        """Start an actor on ``devices`` devices of one node; ``index`` counts such groups of devices over the pool."""
        return self._start(actor, index * devices, devices, args, runtime(environment, python), reserved=devices)

    def start_beside(
        self,
        actor: type,
        first: int,
        devices: int,
        *args: Any,
        environment: Mapping[str, str],
        python: str | None = None,
    ) -> Any:
        """Start an actor that shares the devices from number ``first`` on with the actors that hold them."""
        return self._start(actor, first, devices, args, runtime(environment, python), reserved=0)

    def _start(
        self, actor: type, first: int, devices: int, args: Any, runtime_env: Mapping[str, Any], *, reserved: int
    ) -> Any:
        strategy = PlacementGroupSchedulingStrategy(
            self.reservation, placement_group_bundle_index=first // self.config.devices_per_node
        )
        groups = getattr(actor, "concurrency_groups", None)
        remote: Any = ray.remote(concurrency_groups=groups)(actor) if groups else ray.remote(actor)
        return remote.options(
            num_cpus=reserved,
            num_gpus=reserved if self.on_cuda else 0,
            scheduling_strategy=strategy,
            runtime_env=dict(runtime_env),
        ).remote(*args)


def runtime(environment: Mapping[str, str], python: str | None = None) -> dict[str, Any]:
    """Ray's ``runtime_env`` of an actor: its environment variables, and what it starts by in place of Python."""
    return {"env_vars": dict(environment), **({"py_executable": python} if python else {})}


def start_ray(config: Devices) -> None:
    """Start Ray on this machine, or connect to a cluster; see :func:`has_own_ray`."""
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if not has_own_ray():
        ray.init(**quiet)
        return
    devices = sum(pool.devices for pool in config.pools.values())
    # Devices on CPU are processes: how many share a core is the user's choice, so Ray is told there are enough.
    # "local": a cluster that somebody else started on this machine is not ours to use.
    # Workers that Ray starts before it knows their environment would wait for work in vain.
    system = {"prestart_worker_first_driver": False}
    ray.init(address="local", num_cpus=devices + 2, include_dashboard=False, _system_config=system, **quiet)


def end_on_sigterm() -> None:
    """Let a scheduler's SIGTERM end the run as Ctrl-C does; call it after ``ray.init``, whose handler aborts."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def reserve_pools(config: Devices, timeout_s: float, *, fixed: bool) -> Mapping[str, Pool]:
    """Reserve every pool at once.

    Args:
        timeout_s: how long to wait for devices that others hold, or nodes that are still to join.
        fixed: the cluster is this machine alone: what it lacks will not come.

    Raises:
        PoolError: not all come within ``timeout_s``; names the pools and what the cluster has.
    """
    on_cuda = config.run.device == "cuda"
    if fixed and on_cuda:
        for name, pool in config.pools.items():
            if pool.nodes > 1:
                raise PoolError(
                    f"pools.{name}.nodes: {pool.nodes}, and this is one machine: give "
                    f"{{nodes: 1, devices_per_node: {pool.devices}}}, or name a Ray cluster by RAY_ADDRESS"
                )
    wanted = sum(pool.devices for pool in config.pools.values())
    has = int(ray.cluster_resources().get("GPU", 0))
    if fixed and on_cuda and has < wanted:
        raise PoolError(
            f"the pools have {wanted} devices, this machine has {has} GPUs: make the pools smaller, name a Ray cluster "
            "by RAY_ADDRESS, or run on CPU processes with run.device=cpu"
        )
    pools: dict[str, Pool] = {}
    one_machine = len([node for node in ray.nodes() if node["Alive"]]) == 1
    strategy = "PACK" if one_machine and not on_cuda else "STRICT_SPREAD"
    # Those that need the most of one node first, or smaller ones could leave no node whole.
    for name, pool in sorted(config.pools.items(), key=lambda item: -item[1].devices_per_node):
        bundle: dict[str, float] = {"CPU": pool.devices_per_node, **({"GPU": pool.devices_per_node} if on_cuda else {})}
        if os.environ.get(PIN_POOLS):
            bundle[pool_resource(name)] = 1
        pools[name] = Pool(name, pool, on_cuda, placement_group([bundle] * pool.nodes, strategy=strategy))
    _, late = ray.wait([pool.reservation.ready() for pool in pools.values()], num_returns=len(pools), timeout=timeout_s)
    if late:
        kind = "GPU" if on_cuda else "CPU"
        asked = ", ".join(f"{name}: {p.nodes} x {p.devices_per_node}" for name, p in config.pools.items())
        nodes = ", ".join(
            f"{node['NodeManagerAddress']}: {int(node['Resources'].get(kind, 0))}"
            for node in ray.nodes()
            if node["Alive"]
        )
        for reserved in pools.values():
            remove_placement_group(reserved.reservation)
        raise PoolError(
            f"{len(late)} of the pools ({asked} devices) did not come within {timeout_s:g} s: the nodes of this "
            f"cluster have these {kind}s in all ({nodes}); make the pools smaller, or wait for others or for nodes"
        )
    return {name: pools[name] for name in config.pools}
