"""Whether nodes have the memory for what waits there, page-locked, and for what is copied there to be saved.

What waits are roles and engines that leave their devices at times.

As :mod:`megappo.fit.devices`, which looks at the devices. Plain Python as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from megappo.config import TRAINED, Config
from megappo.fit.devices import Device, DeviceTooSmall, megatron_memory, role_layout, rollout_memory
from megappo.layout.memory import GIB, RoleMemory

ASLEEP, MERGED = "sleeping engines", "weights to be merged with adapters"
SAVED = "checkpoints as they are written"


def check_nodes(config: Config, devices: Mapping[str, Sequence[Device]]) -> None:
    """Compare what waits on every node, and is saved, with the memory that it has.

    Args:
        devices: of each pool, in the order of its ranks.

    Raises:
        DeviceTooSmall: naming the node that lacks most, what is to be there, and the ways out.
    """
    waits = {pool: waiting(config, pool) for pool in devices}
    if found := tuple(node_problems(devices, waits, lambda uses: _ways_out(config, uses))):
        raise DeviceTooSmall(found)


def waiting(config: Config, pool: str) -> list[dict[str, int]]:
    """What waits on the host for each device of a pool, or is saved, in bytes by role and purpose."""
    out: list[dict[str, int]] = [{} for _ in range(config.pools[pool].devices)]
    for name, role in config.roles.megatron.items():
        if role.pool == pool and (role.offload != "none" or name in TRAINED):
            layout = role_layout(config, name)
            stages = [megatron_memory(config, name, layout.rank(pp=stage)) for stage in range(layout.pp)]
            for rank, uses in enumerate(out):
                held = stages[layout.coordinates(rank)["pp"]]
                if role.offload != "none":
                    uses[name] = away(held, role.offload)
                if share := saved(held):
                    uses[SAVED] = max(uses.get(SAVED, 0), share)  # a device's roles are saved one after the other
    rollout = config.roles.rollout
    if rollout.pool == pool:
        shares = any(role.pool == pool for role in config.roles.megatron.values())
        asleep = {ASLEEP} if shares and rollout.sleep == "offload" else set()
        merged = {MERGED} if config.roles.actor.lora is not None else set()
        for uses in out:
            uses |= dict.fromkeys(asleep | merged, rollout_memory(config).weights)
    return out


def host_bytes(config: Config) -> dict[str, int]:
    """Bytes that wait, and are saved, on the fullest node of each pool, where any do."""
    out = {}
    for name, pool in config.pools.items():
        sizes = [sum(uses.values()) for uses in waiting(config, name)]
        nodes = range(0, pool.devices, pool.devices_per_node)
        if most := max(sum(sizes[first : first + pool.devices_per_node]) for first in nodes):
            out[name] = most
    return out


def away(memory: RoleMemory, offload: str) -> int:
    """Bytes that leave; gradients are not kept."""
    return {"none": 0, "optimizer": memory.optimizer, "all": memory.optimizer + memory.weights}[offload]


def saved(memory: RoleMemory) -> int:
    """Bytes that a rank copies for a checkpoint: its share of the optimizer's state, and as much of the weights."""
    return memory.optimizer * 14 // 12


def node_problems(
    devices: Mapping[str, Sequence[Device]],
    waits: Mapping[str, Sequence[Mapping[str, int]]],
    ways_out: Callable[[Mapping[str, int]], Iterator[str]],
) -> Iterator[str]:
    """The node that lacks most memory, in words; nothing where none lacks any.

    Args:
        waits: what is to be on the host for each device of a pool, in bytes by role and purpose.
        ways_out: for a node with what is to be there.
    """
    has: dict[str, int] = {}
    takes: dict[str, Counter[str]] = {}
    for pool, own in devices.items():
        for device, uses in zip(own, waits[pool], strict=False):  # engines may leave some of a pool over
            if device.node_memory:
                has[device.node] = device.node_memory
                takes.setdefault(device.node, Counter()).update(uses)
    node = max(takes, key=lambda node: takes[node].total() - has[node], default="")
    if node and takes[node].total() > has[node]:
        listed = ", ".join(f"{who} {size / GIB:.1f}" for who, size in takes[node].most_common() if size)
        yield (
            f"host memory: {node} has {has[node] / GIB:.1f} GiB, and {takes[node].total() / GIB:.1f} GiB are to be "
            f"there at a time: {listed}; ways out: {'; '.join(ways_out(takes[node]))}"
        )


def _ways_out(config: Config, uses: Mapping[str, int]) -> Iterator[str]:
    for name, role in config.roles.megatron.items():
        if uses.get(name):
            yield f"roles.{name}.offload={'optimizer or none' if role.offload == 'all' else 'none'}"
    if ASLEEP in uses:
        yield "roles.rollout.sleep=drop"
    yield "more tp or pp, which leave fewer copies of the weights"
    yield "nodes with more memory"
