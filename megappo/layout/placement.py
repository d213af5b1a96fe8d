"""Which machine serves which pools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class PoolShape(Protocol):
    """So many nodes, and so many devices on each of them."""

    @property
    def nodes(self) -> int: ...
    @property
    def devices_per_node(self) -> int: ...


def place_pools(pools: Mapping[str, PoolShape], devices_per_node: int) -> tuple[tuple[str, ...], ...]:
    """The pools of each node, on few nodes: first fit, beginning with the pools that need the most of one node.

    No two nodes of a pool are on one machine.

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
