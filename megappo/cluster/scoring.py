"""The processes that score given responses: rewards, and policies for log-probabilities. No engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from megappo.cluster.forks import Forks
from megappo.cluster.groups import Group, MegatronGroup, megatron_groups
from megappo.cluster.processes import Processes
from megappo.cluster.rewards import RewardGroup
from megappo.cluster.start import RunStarter
from megappo.config import Config, MegatronRoleConfig
from megappo.fit.given import check_scoring_fit, scoring_roles
from megappo.stack import MEGATRON


class ScoringCluster(Processes):
    """Groups that only score, as a context manager.

    Attributes:
        groups: the Megatron roles that score.
        reward: what scores responses.
    """

    groups: Mapping[str, MegatronGroup]
    reward: RewardGroup

    def __init__(
        self,
        config: Config,
        data_sources: Sequence[str],
        status: Callable[[str], None],
        forks: Forks | None = None,
    ) -> None:
        """Start everything; see :class:`megappo.cluster.cluster.Cluster`."""
        roles = scoring_roles(config)
        used = {role.pool for role in roles.values()}
        self.config = replace(config, pools={name: pool for name, pool in config.pools.items() if name in used})
        super().__init__(self.config, forks)
        with self._or_end():
            self._start(roles, data_sources, status)

    def _start(
        self, chosen: Mapping[str, MegatronRoleConfig], data_sources: Sequence[str], status: Callable[[str], None]
    ) -> None:
        config = self.config
        start = RunStarter(config, self.calls, self.pools, self.started, self.pythons)
        started = [*(start.pool(name, pool) for name, pool in self.pools.items()), start.rewards()]
        status(f"starting {sum(map(len, started))} processes")
        *placed, scorers = start.located(*started)
        start.check_stacks(*((group, MEGATRON[config.run.device]) for group in placed))
        members = dict(zip(self.pools, placed, strict=True))
        joined = start.join(members)
        if config.run.device == "cuda":
            check_scoring_fit(config, chosen, joined)
        status("loading models")
        functions = Group(scorers, self.calls)
        scoring = (config.model_folder("actor"), config.roles.reward.absolute(), list(data_sources))
        building = [functions.each("build", lambda _: scoring)]
        groups = megatron_groups(chosen, config.pools, members, self.calls)
        for name, group in groups.items():
            role = replace(chosen[name], lora=None)  # adapters that were not trained change nothing
            building.append(group.build(role, config.model_folder(name), config.run))
        self.calls.gather(*building)
        self.groups = groups
        self.reward = RewardGroup(functions, groups.get("reward"), config.roles.reward, config.model_folder("actor"))
