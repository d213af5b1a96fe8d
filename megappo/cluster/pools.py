"""Pools: named sets of devices, reserved as Ray placement groups, and the processes that run on them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megappo.config import Config, PoolConfig


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

    def start(self, actor: type, index: int, devices: int, *args: Any) -> Any:
        """Start an actor on ``devices`` devices of one node; ``index`` counts such groups of devices over the pool."""
        node = index * devices // self.config.devices_per_node
        options: dict[str, Any] = {"num_cpus": devices, "num_gpus": devices if self.on_cuda else 0}
        strategy = PlacementGroupSchedulingStrategy(self.reservation, placement_group_bundle_index=node)
        environment = worker_environment(self.on_cuda)
        remote: Callable[..., Any] = ray.remote(actor)
        return remote.options(  # type: ignore[attr-defined]
            scheduling_strategy=strategy, runtime_env={"env_vars": environment}, max_concurrency=1, **options
        ).remote(*args)


def worker_environment(on_cuda: bool) -> dict[str, str]:
    """Environment variables of a worker process."""
    common = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    if on_cuda:
        # One connection keeps the order in which Megatron overlaps communication with computation.
        return {**common, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    return {**common, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": threads, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def start_ray(config: Config) -> bool:
    """Connect to the cluster that ``RAY_ADDRESS`` names, or start Ray on this machine.

    Returns:
        Whether Ray was started here.
    """
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if os.environ.get("RAY_ADDRESS"):
        ray.init(**quiet)
        return False
    devices = sum(pool.devices for pool in config.pools.values())
    # Devices on CPU are processes: how many share a core is the user's choice, so Ray is told there are enough.
    # "local": a cluster that somebody else started on this machine is not ours to use.
    ray.init(address="local", num_cpus=devices + 2, include_dashboard=False, **quiet)
    return True


def reserve_pools(config: Config, timeout_s: float) -> Mapping[str, Pool]:
    """Reserve every pool at once.

    Raises:
        PoolError: not all come within ``timeout_s``; names the pools and what the cluster has.
    """
    on_cuda = config.run.device == "cuda"
    pools = {}
    for name, pool in config.pools.items():
        bundle: dict[str, float] = {"CPU": pool.devices_per_node}
        if on_cuda:
            bundle["GPU"] = pool.devices_per_node
        one_machine = len([node for node in ray.nodes() if node["Alive"]]) == 1
        strategy = "PACK" if one_machine and not on_cuda else "STRICT_SPREAD"
        pools[name] = Pool(name, pool, on_cuda, placement_group([bundle] * pool.nodes, strategy=strategy))
    _, late = ray.wait([pool.reservation.ready() for pool in pools.values()], num_returns=len(pools), timeout=timeout_s)
    if late:
        kind = "GPU" if on_cuda else "CPU"
        wanted = ", ".join(f"{p.name}: {p.config.nodes} x {p.config.devices_per_node}" for p in pools.values())
        has = int(ray.cluster_resources().get(kind, 0))
        raise PoolError(
            f"{len(late)} of the pools ({wanted} devices) did not come within {timeout_s:g} s: this cluster has {has} "
            f"{kind}s on {len(ray.nodes())} nodes; make the pools smaller, or wait for nodes to join"
        )
    return pools
