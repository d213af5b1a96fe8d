"""What NCCL takes of a pool's devices, beside torch: a fixed cost of working together, known before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from megappo.config import TRAINED, Config
from megappo.layout.communicators import group_memory, pair_memory, with_library
from megappo.layout.mesh import Layout


def pool_communicators(config: Config, pool: str, layouts: Mapping[str, Layout], actor: Layout) -> int:
    """Bytes on each device of a pool: of its roles' groups, and of the weight sync's pairs at both ends.

    Groups of an engine are not counted here: vLLM takes them off its share.

    Args:
        layouts: of the Megatron roles on the pool, by name.
        actor: the actor's, wherever it is.
    """
    training = sum(group_memory(layout, trained=name in TRAINED) for name, layout in layouts.items())
    serving = 0
    sends, receives = sync_peers(config, actor)
    if config.roles.actor.pool == pool:
        training += pair_memory(sends, receives=False)
    if config.roles.rollout.pool == pool:
        serving = pair_memory(receives, receives=True)
    return with_library(training, serving)


def sync_peers(config: Config, actor: Layout) -> tuple[int, int]:
    """About how many ranks on other devices an actor's rank sends to, and an engine's receives from, over NCCL."""
    rollout = config.roles.rollout
    if rollout.transport == "gloo":
        return 0, 0
    sources = actor.pp * ceil(actor.tp / rollout.tp)
    if rollout.pool == config.roles.actor.pool:  # one of them is on the device itself
        sources -= 1
    engines = config.pools[rollout.pool].devices // rollout.tp
    return ceil(engines * rollout.tp * sources / actor.world), sources
