"""All processes of a run: started, connected and ended together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import ray

from megappo.cluster.actors import MegatronProcess, RewardProcess, RolloutProcess
from megappo.cluster.calls import Calls, Pending, Place, one
from megappo.cluster.groups import Group, MegatronGroup, Member, RewardGroup, RolloutGroup, layouts
from megappo.cluster.pools import Pool, reserve_pools, start_ray, worker_environment
from megappo.config import Config, MegatronRoleConfig
from megappo.models.spec import read_model_spec
from megappo.reshard.actor_to_rollout import TransferSpec
from megappo.reshard.plan import plan_hash
from megappo.workers.settings import EngineSettings, RoleSettings

PROBE_LIMIT = 500_000_000
"""Models of more parameters are not probed at start-up: the numbered copy would take 8 bytes a parameter."""


class WeightMismatch(RuntimeError):
    """Our table of vLLM's weights, or two ranks' plans, do not agree; training would use wrong weights."""


class Cluster:
    """The worker groups of a run, as a context manager.

    Attributes:
        actor, critic, reference, rollout, reward: the groups; ``reference`` is ``None`` where no KL term is in use.
        calls: waits for what they were asked.
    """

    actor: MegatronGroup
    critic: MegatronGroup
    reference: MegatronGroup | None
    rollout: RolloutGroup
    reward: RewardGroup

    def __init__(self, config: Config, data_sources: Sequence[str], status: Callable[[str], None]) -> None:
        """Start everything.

        Args:
            data_sources: all that occur in the data; each must have a reward function.
            status: told what is going on, one line at a time.

        Raises:
            PoolError: the cluster lacks devices.
            WorkerFailed: a worker could not start.
            WeightMismatch: weights would go to wrong places.
        """
        self.config = config
        self.calls = Calls(config.run.timeout_s)
        self._owns_ray = False
        try:
            self._start(data_sources, status)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all processes of the run."""
        for pool in getattr(self, "_pools", {}).values():
            ray.util.remove_placement_group(pool.reservation)  # kills the processes in it
        if self._owns_ray:
            ray.shutdown()

    def gather(self, *pending: Pending[Any]) -> list[Any]:
        """See :meth:`Calls.gather`."""
        return self.calls.gather(*pending)

    def sync_weights(self, version: int) -> int:
        """Give all engines the actor's current weights; returns the bytes received over all engines."""
        receiving = self.rollout.each("call", lambda engine: ("receive_weights", version), sum)
        sending = self.actor.each("send_weights", lambda rank: ("actor",), sum)
        received, sent = self.gather(receiving, sending)
        if received != sent:
            raise WeightMismatch(f"weight sync {version}: {sent} bytes were sent, {received} received")
        return received

    # --- starting ------------------------------------------------------------------------------------------------

    def _start(self, data_sources: Sequence[str], status: Callable[[str], None]) -> None:
        config = self.config
        self._owns_ray = start_ray(config)
        self._pools = reserve_pools(config, min(config.run.timeout_s, 600.0))
        roles: dict[str, MegatronRoleConfig] = {"actor": config.roles.actor, "critic": config.roles.critic}
        if config.roles.reference is not None:
            roles["reference"] = config.roles.reference
        self._layouts = layouts(roles, config.pools)

        started = {name: self._start_pool(name, pool) for name, pool in self._pools.items() if self._hosts(name, roles)}
        started["rollout"], started["reward"] = self._start_engines(), self._start_rewards()
        status(f"starting {sum(map(len, started.values()))} processes")
        members = self._located(started)
        self.rollout = RolloutGroup(members.pop("rollout"), self.calls)
        self.reward = RewardGroup(members.pop("reward"), self.calls)
        engines = self.rollout.each("build", lambda _: (self._engine_settings(),))
        rewards = self.reward.each("build", lambda _: (config.model, config.roles.reward, list(data_sources)))
        self._join_pools(members)
        groups = {}
        for name, role in roles.items():
            placed = tuple(Member(m.actor, replace(m.place, role=name)) for m in members[role.pool])
            groups[name] = MegatronGroup(placed, self.calls, name, self._layouts[name])
        status("loading models")
        self.gather(
            *[group.build(self._settings(group, roles[name])) for name, group in groups.items()], engines, rewards
        )
        self.actor, self.critic, self.reference = groups["actor"], groups["critic"], groups.get("reference")
        status("connecting actor and engines")
        self._connect()

    @staticmethod
    def _hosts(pool: str, roles: dict[str, MegatronRoleConfig]) -> bool:
        return any(role.pool == pool for role in roles.values())

    def _log_file(self, name: str) -> str:
        return str((Path(self.config.run.dir) / "logs" / f"{name}.log").resolve())

    def _start_pool(self, name: str, pool: Pool) -> list[Member]:
        members = []
        for rank in range(pool.config.devices):
            log = self._log_file(f"{name}-rank{rank}")
            actor = pool.start(MegatronProcess, rank, 1, log)
            members.append(Member(actor, Place(name, rank, name, "?", log)))
        return members

    def _start_engines(self) -> list[Member]:
        rollout = self.config.roles.rollout
        pool = self._pools[rollout.pool]
        members = []
        for index in range(pool.config.devices // rollout.tp):
            log = self._log_file(f"rollout-engine{index}")
            actor = pool.start(RolloutProcess, index, rollout.tp, log)
            members.append(Member(actor, Place("rollout", index, pool.name, "?", log)))
        return members

    def _start_rewards(self) -> list[Member]:
        log = self._log_file("reward")
        environment = worker_environment(on_cuda=False)
        actor = ray.remote(RewardProcess).options(num_cpus=1, runtime_env={"env_vars": environment}).remote(log)
        return [Member(actor, Place("reward", 0, "none", "?", log))]

    def _located(self, started: dict[str, list[Member]]) -> dict[str, tuple[Member, ...]]:
        """The same members, once they run, with the names of their nodes."""
        asked = [Group(tuple(members), self.calls).each("address", lambda _: ()) for members in started.values()]
        return {
            name: tuple(
                Member(member.actor, replace(member.place, node=host))
                for member, (host, _) in zip(members, addresses, strict=True)
            )
            for (name, members), addresses in zip(started.items(), self.gather(*asked), strict=True)
        }

    def _join_pools(self, members: dict[str, tuple[Member, ...]]) -> None:
        """Every pool becomes one torch.distributed world; its first process is the meeting point."""
        groups = [Group(pool, self.calls) for pool in members.values()]
        firsts = [Group(group.members[:1], self.calls).each("address", lambda _: (), one) for group in groups]
        addresses = self.gather(*firsts)

        def joining(group: Group, host: str, port: int) -> Pending[Any]:
            run, world = self.config.run, len(group.members)
            return group.each("join", lambda rank: (rank, world, host, port, run.timeout_s, run.seed))

        self.gather(*[joining(group, *address) for group, address in zip(groups, addresses, strict=True)])

    def _settings(self, group: MegatronGroup, role: MegatronRoleConfig) -> RoleSettings:
        return RoleSettings(
            folder=role.model or self.config.model,
            layout=group.layout,
            dtype=self.config.run.dtype,
            micro_batch_tokens=role.micro_batch_tokens,
            scalar_head=group.role == "critic",
            optimizer=None if group.role == "reference" else self.config.ppo.optimizer,
        )

    def _engine_settings(self) -> EngineSettings:
        config, rollout = self.config, self.config.roles.rollout
        return EngineSettings(
            folder=config.roles.actor.model or config.model,
            tp=rollout.tp,
            dtype=config.run.dtype,
            max_tokens=config.data.max_prompt + config.data.max_response,
            max_sequences=rollout.max_sequences,
            memory_fraction=rollout.memory_fraction,
            kv_cache_gib=rollout.kv_cache_gib,
            on_cuda=config.run.device == "cuda",
            seed=config.run.seed,
        )

    def _connect(self) -> None:
        """Form the transfer group of actor and engines, and prove that weights will land where they belong."""
        transfer = TransferSpec(
            model=read_model_spec(self.config.roles.actor.model or self.config.model),
            actor=self._layouts["actor"],
            engines=len(self.rollout.members),
            engine_tp=self.config.roles.rollout.tp,
            fused_norms=self.config.run.device == "cuda",
        )
        timeout_s = self.config.run.timeout_s
        first = Group(self.actor.members[:1], self.calls)
        ((host, port),) = self.gather(first.each("host_transfer", lambda _: (timeout_s,), one))
        receivers = self.rollout.each("call", lambda e: ("join_transfer", transfer, e, host, port, timeout_s))
        senders = self.actor.each("join_transfer", lambda _: ("actor", transfer, host, port, timeout_s))
        hashes = {found for side in self.gather(receivers, senders) for found in side}
        if hashes != {plan_hash(transfer.plan())}:
            raise WeightMismatch(f"the ranks computed different transfer plans: {sorted(hashes)}")
        if transfer.model.num_parameters() <= PROBE_LIMIT:
            (found,) = self.gather(self.rollout.each("call", lambda _: ("probe", transfer)))
            if differences := [line for lines in found for line in lines]:
                raise WeightMismatch("\n".join(differences))
