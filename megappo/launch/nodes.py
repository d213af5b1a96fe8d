"""Which machine serves which pools."""

from __future__ import annotations

from collections.abc import Mapping

from megappo.config import PoolConfig

PIN_POOLS = "MEGAPPO_PIN_POOLS"
"""Environment variable: if set, a pool takes only nodes that announce its :func:`pool_resource`."""


def pool_resource(pool: str) -> str:
    """The custom Ray resource by which a node says that it serves a pool."""
    return f"pool_{pool}"


def node_resource(node: str) -> str:
    """The custom Ray resource by which a node tells the name that the scheduler knows it by."""
    return f"node_{node}"


def place_pools(pools: Mapping[str, PoolConfig], devices_per_node: int) -> tuple[tuple[str, ...], ...]:
    """The pools of each node, on few nodes: first fit, beginning with the pools that need the most of one node.

    Args:
        devices_per_node: devices of every node; no pool may be wider.
    """
    free: list[int] = []
    serves: list[list[str]] = []
    for name, pool in sorted(pools.items(), key=lambda item: -item[1].devices_per_node):
        fitting = [node for node, devices in enumerate(free) if devices >= pool.devices_per_node][: pool.nodes]
        for node in range(len(free), len(free) + pool.nodes - len(fitting)):
            free.append(devices_per_node)
            serves.append([])
            fitting.append(node)
        for node in fitting:
            free[node] -= pool.devices_per_node
            serves[node].append(name)
    return tuple(map(tuple, serves))
