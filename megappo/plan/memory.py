"""Memory of every role, pipeline stage and pool on a kind of device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from megappo.config import Config, PoolConfig
from megappo.fit import (
    Device,
    DeviceTooSmall,
    Turn,
    check_fit,
    megatron_memory,
    pool_turns,
    role_layout,
    rollout_memory,
)
from megappo.layout.devices import DeviceProfile
from megappo.layout.engine_memory import EngineMemory
from megappo.layout.generation import cached_sequences
from megappo.layout.memory import CONTEXT, RoleMemory


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
    empty = Device(device.name, device.memory, device.memory - CONTEXT)
    try:
        check_fit(config, {name: [empty] * pool.devices for name, pool in used_pools(config).items()})
    except DeviceTooSmall as error:
        return error.problems
    return ()


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


def host_bytes(config: Config) -> dict[str, int]:
    """Pinned host memory that each pool's fullest node needs for what is offloaded, and for weights to be merged."""
    out = {}
    for name, pool in config.pools.items():
        device = 0
        for role, its in config.roles.megatron.items():
            if its.pool == name and its.offload != "none":
                layout = role_layout(config, role)
                memory = [megatron_memory(config, role, layout.rank(pp=stage)) for stage in {0, layout.pp - 1}]
                device += max(m.optimizer + (m.weights if its.offload == "all" else 0) for m in memory)
        rollout = config.roles.rollout
        if rollout.pool == name and rollout.sleep == "offload" and _shares(config):
            device += rollout_memory(config).weights
        if rollout.pool == name and config.roles.actor.lora is not None:
            device += rollout_memory(config).weights
        if device:
            out[name] = device * pool.devices_per_node
    return out


def _shares(config: Config) -> bool:
    return any(role.pool == config.roles.rollout.pool for role in config.roles.megatron.values())
