"""The processes that score given responses: rewards, and policies for log-probabilities. No engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType

import ray

from megappo.cluster.calls import Calls
from megappo.cluster.groups import Group, MegatronGroup, Member, layouts
from megappo.cluster.pools import Pool, end_on_sigterm, reserve_pools, start_ray
from megappo.cluster.rewards import RewardGroup
from megappo.cluster.start import RunStarter
from megappo.config import SCALAR_HEAD, Config, MegatronRoleConfig
from megappo.stack import MEGATRON
from megappo.workers.settings import RoleSettings

ROLES = ("actor", "reference", "reward")
"""The Megatron roles that score responses."""


class ScoringCluster:
    """Groups that only score, as a context manager.

    Attributes:
        groups: the Megatron roles among :data:`ROLES` that the configuration has.
        reward: what scores responses.
        calls: waits for what they were asked.
    """

    groups: Mapping[str, MegatronGroup]
    reward: RewardGroup

    def __init__(self, config: Config, data_sources: Sequence[str], status: Callable[[str], None]) -> None:
        """Start everything; see :class:`megappo.cluster.cluster.Cluster`."""
        self.calls = Calls(config.run.timeout_s)
        self._owns_ray = False
        self._pools: Mapping[str, Pool] = {}
        roles = {name: role for name, role in config.roles.megatron.items() if name in ROLES}
        used = {role.pool for role in roles.values()}
        self.config = replace(config, pools={name: pool for name, pool in config.pools.items() if name in used})
        try:
            self._start(roles, data_sources, status)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ScoringCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all processes."""
        for pool in self._pools.values():
            ray.util.remove_placement_group(pool.reservation)
        if self._owns_ray:
            ray.shutdown()

    def _start(
        self, chosen: Mapping[str, MegatronRoleConfig], data_sources: Sequence[str], status: Callable[[str], None]
    ) -> None:
        config = self.config
        self._owns_ray = start_ray(config)
        end_on_sigterm()
        self._pools = reserve_pools(config, min(config.run.timeout_s, 600.0), fixed=self._owns_ray)
        start = RunStarter(config, self.calls, self._pools)
        started = [*(start.pool(name, pool) for name, pool in self._pools.items()), start.rewards()]
        status(f"starting {sum(map(len, started))} processes")
        *placed, scorers = start.located(*started)
        start.check_stacks(*((group, MEGATRON[config.run.device]) for group in placed))
        members = dict(zip(self._pools, placed, strict=True))
        start.join(members)
        status("loading models")
        functions = Group(scorers, self.calls)
        scoring = (config.model_folder("actor"), config.roles.reward.absolute(), list(data_sources))
        building = [functions.each("build", lambda _: scoring)]
        groups = {}
        for name, layout in layouts(chosen, config.pools).items():
            role = chosen[name]
            ranks = tuple(Member(m.actor, replace(m.place, role=name), m.device) for m in members[role.pool])
            groups[name] = MegatronGroup(ranks, self.calls, name, layout)
            settings = RoleSettings(
                folder=config.model_folder(name),
                layout=layout,
                dtype=config.run.dtype,
                micro_batch_tokens=role.micro_batch_tokens,
                scalar_head=name in SCALAR_HEAD,
                timeout_s=config.run.timeout_s,
                fp8=role.fp8,
                offload=role.offload,
            )
            building.append(groups[name].build(settings))
        self.calls.gather(*building)
        self.groups = groups
        self.reward = RewardGroup(functions, groups.get("reward"), config.roles.reward, config.model_folder("actor"))
