"""One line for each role of a run: which pool it has, and how it is laid out there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

ROLE_ORDER = ("actor", "critic", "reference", "rollout", "reward")


class RoleRow(NamedTuple):
    role: str
    pool: str
    layout: str
    devices: int
    """Devices of the pool; 0 for a role that has none (reward functions)."""


def describe_roles(config: Mapping[str, Any]) -> list[RoleRow]:
    """The roles of a resolved config, given as plain values.

    It never raises: an incomplete config gives fewer rows, since a report must come out for any run.
    """
    pools, roles = _mapping(config.get("pools")), _mapping(config.get("roles"))
    names = [name for name in ROLE_ORDER if name in roles] + sorted(set(roles) - set(ROLE_ORDER))
    return [_describe(name, _mapping(roles[name]), pools) for name in names if roles[name] is not None]


def _describe(name: str, role: Mapping[str, Any], pools: Mapping[str, Any]) -> RoleRow:
    pool = role.get("pool")
    functions = [role.get("function"), *_mapping(role.get("by_source")).values()]
    named = ", ".join(dict.fromkeys(str(function) for function in functions if function))
    if pool is None:
        return RoleRow(name, "driver", f"{role.get('processes', 1)} processes: {named}", 0)
    sizes = _mapping(pools.get(pool))
    devices = _integer(sizes.get("nodes")) * _integer(sizes.get("devices_per_node"))
    tp, pp = _integer(role.get("tp")), _integer(role.get("pp"))
    copies = devices // (tp * pp)
    if name == "rollout":
        layout = f"{copies} engine{'' if copies == 1 else 's'} x TP{tp}"
    else:
        chunks = f" x VPP{role['vpp']}" if _integer(role.get("vpp")) > 1 else ""
        layout = f"TP{tp} x PP{pp}{chunks} x DP{copies}" + (" + SP" if role.get("sequence_parallel") else "")
    return RoleRow(name, str(pool), f"{layout}, and {named}" if named else layout, devices)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _integer(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 1
