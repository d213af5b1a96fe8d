"""Memory of every role, pipeline stage and pool on a kind of device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from megappo.config import Config, Devices, PoolConfig
from megappo.fit.devices import (
    Device,
    DeviceTooSmall,
    Turn,
    check_fit,
    megatron_memory,
    pool_turns,
    role_layout,
    rollout_memory,
)
from megappo.fit.host import check_nodes
from megappo.layout.devices import DeviceProfile
from megappo.layout.engine_memory import EngineMemory
from megappo.layout.generation import cached_sequences
from megappo.layout.memory import CONTEXT, GIB, RoleMemory
from megappo.plan.sync import places


@dataclass(frozen=True)
class Stage:
    """What a role takes, part by part at most, on each device of consecutive pipeline stages."""

    role: str
    first: int
    last: int
    memory: RoleMemory

    @property
    def name(self) -> str:
        """For instance ``0`` or ``1-6``."""
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


@dataclass(frozen=True)
class Engine:
    """An engine's share of a device.

    Attributes:
        memory: its fixed parts.
        cache: bytes left for keys and values.
        sequences: of the greatest length that fit in there.
    """

    memory: EngineMemory
    cache: int
    sequences: int


@dataclass(frozen=True)
class Peak:
    """The turn of a pool that takes most, on the device that it takes most of."""

    pool: str
    rank: int
    turn: Turn


def fit_problems(config: Config, device: DeviceProfile) -> tuple[str, ...]:
    """What does not fit, in words, each with the ways out; empty if everything does."""
    devices = empty_devices(config, device)
    empty = {name: devices[name] for name in used_pools(config)}
    found: list[str] = []
    for check in (check_fit, check_nodes):
        try:
            check(config, empty)
        except DeviceTooSmall as error:
            found += error.problems
    return tuple(found)


def empty_devices(config: Devices, device: DeviceProfile) -> dict[str, list[Device]]:
    """Those of each pool, as they would be with nothing on them."""
    memory = int((device.host_memory_gib or 0) * GIB)
    return {
        name: [Device(device.name, device.memory, device.memory - CONTEXT, node, memory) for node, _ in its]
        for name, its in places(config, device.devices_per_node).items()
    }


def used_pools(config: Config) -> dict[str, PoolConfig]:
    """The pools that a role names."""
    named = {*(role.pool for role in config.roles.megatron.values()), config.roles.rollout.pool}
    return {name: pool for name, pool in config.pools.items() if name in named}


def role_stages(config: Config) -> Iterator[Stage]:
    """Every Megatron role's stages: the first, those between, the last."""
    for name in config.roles.megatron:
        layout = role_layout(config, name)
        memory = [megatron_memory(config, name, layout.rank(pp=stage)) for stage in range(layout.pp)]
        yield Stage(name, 0, 0, memory[0])
        if layout.pp > 2:
            between = memory[1:-1]
            most = RoleMemory(*(max(getattr(one, part.name) for one in between) for part in fields(RoleMemory)))
            yield Stage(name, 1, layout.pp - 2, most)
        if layout.pp > 1:
            yield Stage(name, layout.pp - 1, layout.pp - 1, memory[-1])


def engine_share(config: Config, device: DeviceProfile) -> Engine:
    """What one of an engine's devices holds."""
    memory, share = rollout_memory(config), int(config.roles.rollout.memory_fraction * device.memory)
    return Engine(memory, max(share - memory.least + memory.sequence, 0), cached_sequences(memory, share))


def peaks(config: Config, device: DeviceProfile) -> Iterator[Peak]:
    """The fullest moment of each pool."""
    for name in config.pools:
        if turns := list(_turns(config, device, name)):
            yield Peak(name, *max(turns, key=lambda found: found[1].need))


def role_peaks(config: Config, device: DeviceProfile, length: float) -> dict[str, int]:
    """Bytes of all Megatron roles together on the fullest device, while each of them is updated.

    Args:
        length: tokens of a sequence.
    """
    out: dict[str, int] = {}
    for name in config.pools:
        for _, turn in _turns(config, device, name, length):
            if turn.role and turn.doing.startswith("updating"):
                need = sum(sum(use.values()) for who, use in turn.uses.items() if who in config.roles.megatron)
                out[turn.role] = max(out.get(turn.role, 0), need)
    return out


def _turns(config: Config, device: DeviceProfile, name: str, length: float | None = None) -> Iterator[tuple[int, Turn]]:
    """(rank, turn) of a pool; ranks of the same stages take the same, and the first stands for all."""
    layouts = [role_layout(config, role) for role, its in config.roles.megatron.items() if its.pool == name]
    kinds: dict[tuple[int, ...], int] = {}
    for rank in range(config.pools[name].devices):
        kinds.setdefault(tuple(layout.coordinates(rank)["pp"] for layout in layouts), rank)
    for rank in kinds.values():
        yield from ((rank, turn) for turn in pool_turns(config, name, rank, device.memory, length))
