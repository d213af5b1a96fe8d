"""All processes of a run: started, connected and ended together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megappo.cluster.actors import MegatronProcess, RewardProcess, RolloutProcess
from megappo.cluster.calls import Calls, Pending, Place, one
from megappo.cluster.groups import Group, MegatronGroup, Member, RewardGroup, RolloutGroup, layouts
from megappo.cluster.pools import Pool, end_on_sigterm, reserve_pools, start_ray, worker_environment
from megappo.config import Config, MegatronRoleConfig
from megappo.fit import Device, check_fit
from megappo.models.spec import read_model_spec
from megappo.reshard.actor_to_rollout import Meeting, Receipt, TransferSpec, total_receipt
from megappo.reshard.agreement import disagreement
from megappo.stack import MEGATRON, ROLLOUT, StackError, Wanted
from megappo.workers.settings import EngineSettings, RoleSettings

PEERS_FIRST = 0.9
"""Ranks wait for each other a little less long than the driver waits for them: they know better who is late."""


class WeightMismatch(RuntimeError):
    """Weights did not arrive as sent, or would not arrive where they belong; training would use wrong ones."""


class Cluster:
    """The worker groups of a run, as a context manager.

    Attributes:
        actor, critic, reference, rollout, reward: the groups; ``critic`` is ``None`` where advantages need no values,
            ``reference`` where no KL term is in use.
        calls: waits for what they were asked.
        device_name: of the Megatron processes' devices, as CUDA names it; "cpu" without.
    """

    actor: MegatronGroup
    critic: MegatronGroup | None
    reference: MegatronGroup | None
    rollout: RolloutGroup
    reward: RewardGroup
    device_name: str

    def __init__(self, config: Config, data_sources: Sequence[str], status: Callable[[str], None]) -> None:
        """Start everything.

        Args:
            data_sources: all that occur in the data; each must have a reward function.
            status: told what is going on, one line at a time.

        Raises:
            PoolError: the cluster lacks devices.
            StackError: a node lacks a package, or has it in a version that does not work.
            DeviceTooSmall: a pool's devices lack memory.
            WorkerFailed: a worker could not start.
            WeightMismatch: weights would go to wrong places.
        """
        self.config = config
        self.calls = Calls(config.run.timeout_s)
        self._owns_ray = False
        self._pools: Mapping[str, Pool] = {}
        self._asleep = self._on_device = self._mapped = False
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
        for pool in self._pools.values():
            ray.util.remove_placement_group(pool.reservation)  # kills the processes in it
        if self._owns_ray:
            ray.shutdown()

    def gather(self, *pending: Pending[Any]) -> list[Any]:
        """See :meth:`Calls.gather`."""
        return self.calls.gather(*pending)

    @property
    def trained(self) -> dict[str, MegatronGroup]:
        """The roles that learn."""
        return {**({} if self.critic is None else {"critic": self.critic}), "actor": self.actor}

    def rest_engines(self) -> None:
        """Give the engines' memory to the roles that share their devices; a weight sync wakes them again."""
        if self._engines_sleep and not self._asleep:
            self._ask_engines("sleep")
            self._asleep = True

    @contextmanager
    def everything_loaded(self, version: int) -> Iterator[None]:
        """Room in here for roles to have their optimizer's state on devices that they share with engines.

        Args:
            version: of the actor's weights, which the engines get again afterwards.
        """
        if not self._offloading_beside_engines:
            yield
            return
        self.rest_engines()
        yield
        self.sync_weights(version)

    def sync_weights(self, version: int) -> int:
        """Give all engines the actor's current weights; returns the bytes received over all engines.

        Raises:
            WeightMismatch: they did not arrive as they were sent.
            WorkerFailed: a worker died, or did not answer in time.
        """
        if self._asleep:
            for group in self._offloading_beside_engines[:1]:  # all of them are in the same processes
                self.gather(group.each("settle", lambda _: ()))
            self._ask_engines("wake", "weights")
        if self._on_device:
            receipt, sent = self._copy_on_device(version), self._planned_bytes
        else:
            receiving = self.rollout.ask("receive_weights", lambda _: (version,), total_receipt)
            sending = self.actor.each("send_weights", lambda _: ("actor", version), sum)
            receipt, sent = self.gather(receiving, sending)
            sent += receipt.sent  # passed on between workers
        if receipt.mismatches:
            raise WeightMismatch("\n".join(receipt.mismatches))
        if receipt.received != sent:
            raise WeightMismatch(f"weight sync {version}: {sent} bytes were sent, {receipt.received} received")
        if self._actor_weights_leave:
            self.gather(self.actor.each("rest", lambda _: ("actor",)))
        if self._asleep:
            self._ask_engines("wake", "kv_cache")
            self._asleep = False
        return receipt.received

    def _copy_on_device(self, version: int) -> Receipt:
        if not self._mapped:
            (shared,) = self.gather(self.actor.each("share_weights", lambda _: ("actor",)))
            self._ask_engines("open_shared", {rank: params for rank, params in enumerate(shared) if params})
            self._mapped = True
        sums: dict[int, Any] = {}
        if self.config.roles.rollout.verify != "off":
            (found,) = self.gather(self.actor.each("weight_sums", lambda _: ("actor", version)))
            sums = dict(enumerate(found))
        (receipt,) = self.gather(self.rollout.ask("receive_shared", lambda _: (version, sums), total_receipt))
        if self._actor_weights_leave:  # and come back to other places
            self._ask_engines("close_shared")
            self._mapped = False
        return receipt

    @property
    def _actor_weights_leave(self) -> bool:
        return self.config.roles.actor.offload == "all"

    @property
    def _offloading_beside_engines(self) -> list[MegatronGroup]:
        roles, pool = self.config.roles, self.config.roles.rollout.pool
        groups = [group for group in (self.actor, self.critic, self.reference) if group is not None]
        return [
            group
            for group in groups
            if roles.megatron[group.role].offload != "none" and roles.megatron[group.role].pool == pool
        ]

    def _ask_engines(self, method: str, *args: Any) -> list[Any]:
        (answers,) = self.gather(self.rollout.ask(method, lambda _: args))
        return answers

    # --- starting ------------------------------------------------------------------------------------------------

    def _start(self, data_sources: Sequence[str], status: Callable[[str], None]) -> None:
        config = self.config
        self._owns_ray = start_ray(config)
        end_on_sigterm()
        self._pools = reserve_pools(config, min(config.run.timeout_s, 600.0), fixed=self._owns_ray)
        roles, device = config.roles.megatron, config.run.device
        self._layouts = layouts(roles, config.pools)

        hosted = {name: pool for name, pool in self._pools.items() if any(r.pool == name for r in roles.values())}
        shared = config.roles.rollout.pool in hosted
        self._engines_sleep = shared and device == "cuda" and config.roles.rollout.sleep != "off"
        started = [self._start_pool(name, pool) for name, pool in hosted.items()]
        started += [self._start_rewards(), [] if shared else self._start_engines()]
        status(f"starting {sum(map(len, started))} processes")
        *placed, scorers, serving = self._located(*started)
        self._check_stacks(*((group, MEGATRON[device]) for group in placed), (serving, ROLLOUT[device]))
        members = dict(zip(hosted, placed, strict=True))
        joined = self._join_pools(members)
        self.device_name = next(iter(joined.values()))[0].name
        if device == "cuda":
            alone = {} if shared else {config.roles.rollout.pool: self._engine_devices(serving)}
            check_fit(config, {**joined, **alone})
        if shared:
            (serving,) = self._located(self._start_engines_beside(members[config.roles.rollout.pool]))
            self._check_stacks((serving, ROLLOUT[device]))
        self.rollout = RolloutGroup(serving, self.calls)
        self.reward = RewardGroup(scorers, self.calls)
        engines = self.rollout.each("build", lambda _: (self._engine_settings(),))
        scoring = (config.model_folder("actor"), config.roles.reward.absolute(), list(data_sources))
        rewards = self.reward.each("build", lambda _: scoring)
        if shared:  # vLLM measures what memory is left to it, so nothing else may come and go meanwhile
            status("starting the engines")
            self.gather(engines)
            self.rest_engines()
        groups = {}
        for name, role in roles.items():
            ranks = tuple(Member(m.actor, replace(m.place, role=name), m.device) for m in members[role.pool])
            groups[name] = MegatronGroup(ranks, self.calls, name, self._layouts[name])
        status("loading models")
        building = [group.build(self._settings(group, roles[name])) for name, group in groups.items()]
        self.gather(*building, rewards, *([] if shared else [engines]))
        self.actor, self.critic, self.reference = groups["actor"], groups.get("critic"), groups.get("reference")
        status("connecting actor and engines")
        self._connect()

    def _log_file(self, name: str) -> str:
        return str((Path(self.config.run.dir) / "logs" / f"{name}.log").resolve())

    def _start_pool(self, name: str, pool: Pool) -> list[Member]:
        # One connection keeps the order in which Megatron overlaps communication with computation.
        environment = worker_environment(self.config, CUDA_DEVICE_MAX_CONNECTIONS="1")
        members = []
        for rank in range(pool.config.devices):
            log = self._log_file(f"{name}-rank{rank}")
            actor = pool.start(MegatronProcess, rank, 1, log, environment=environment)
            members.append(Member(actor, Place(name, rank, name, "?", log)))
        return members

    def _start_engines(self) -> list[Member]:
        pool, tp = self._pools[self.config.roles.rollout.pool], self.config.roles.rollout.tp
        environment = worker_environment(self.config)
        members = []
        for index in range(pool.config.devices // tp):
            log = self._log_file(f"rollout-engine{index}")
            actor = pool.start(RolloutProcess, index, tp, log, environment=environment)
            members.append(Member(actor, Place("rollout", index, pool.name, "?", log)))
        return members

    def _start_engines_beside(self, hosts: Sequence[Member]) -> list[Member]:
        """Engines on the devices of a pool's Megatron processes."""
        pool, tp = self._pools[self.config.roles.rollout.pool], self.config.roles.rollout.tp
        members = []
        for index in range(len(hosts) // tp):
            devices = [host.device for host in hosts[index * tp : (index + 1) * tp]]
            environment = worker_environment(self.config, CUDA_VISIBLE_DEVICES=",".join(devices))
            log = self._log_file(f"rollout-engine{index}")
            actor = pool.start_beside(RolloutProcess, index * tp, tp, log, environment=environment)
            members.append(Member(actor, Place("rollout", index, pool.name, "?", log)))
        return members

    def _start_rewards(self) -> list[Member]:
        log = self._log_file("reward")
        # On the driver's node, and without a reserved CPU: pools may have reserved them all.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        environment = worker_environment(self.config, CUDA_VISIBLE_DEVICES="")
        remote: Any = ray.remote(RewardProcess)
        options = {"num_cpus": 0, "scheduling_strategy": here, "runtime_env": {"env_vars": environment}}
        return [Member(remote.options(**options).remote(log), Place("reward", 0, "driver", "?", log))]

    def _located(self, *started: list[Member]) -> list[tuple[Member, ...]]:
        """The same members, once they run, with their nodes and devices."""
        asked = [Group(tuple(members), self.calls).each("whereabouts", lambda _: ()) for members in started]
        return [
            tuple(
                Member(member.actor, replace(member.place, node=node), device)
                for member, (node, device) in zip(members, found, strict=True)
            )
            for members, found in zip(started, self.gather(*asked), strict=True)
        ]

    def _check_stacks(self, *processes: tuple[tuple[Member, ...], tuple[Wanted, ...]]) -> None:
        """Whether processes have the packages that they are about to import.

        Raises:
            StackError: some do not.
        """

        def asking(group: tuple[Member, ...], wanted: tuple[Wanted, ...]) -> Pending[Any]:
            return Group(group, self.calls).each("stack_problems", lambda _: (wanted,))

        asked = [asking(*process) for process in processes]
        found = {
            f"node {member.place.node}: {problem}": None  # once a node
            for (group, _), answers in zip(processes, self.gather(*asked), strict=True)
            for member, problems in zip(group, answers, strict=True)
            for problem in problems
        }
        if found:
            raise StackError(found)

    def _engine_devices(self, engines: tuple[Member, ...]) -> list[Device]:
        """Devices of a pool that engines have for themselves."""
        (found,) = self.gather(Group(engines, self.calls).each("devices", lambda _: ()))
        return [device for devices in found for device in devices]

    def _join_pools(self, members: Mapping[str, tuple[Member, ...]]) -> dict[str, list[Device]]:
        """Every pool becomes one torch.distributed world; its first process is the meeting point.

        Returns the devices of each pool, by rank.
        """
        run = self.config.run
        groups = [Group(pool, self.calls) for pool in members.values()]
        addresses = self.gather(*[self._host_store(group) for group in groups])

        def joining(group: Group, host: str, port: int) -> Pending[Any]:
            world = len(group.members)
            return group.each("join", lambda rank: (rank, world, host, port, run.timeout_s, run.seed))

        joined = self.gather(*[joining(group, *address) for group, address in zip(groups, addresses, strict=True)])
        return dict(zip(members, joined, strict=True))

    def _host_store(self, group: Group) -> Pending[tuple[str, int]]:
        """Ask the first process of a group to open a meeting point."""
        timeout_s = self.config.run.timeout_s
        return Group(group.members[:1], self.calls).each("host_store", lambda _: (timeout_s,), one)

    def _settings(self, group: MegatronGroup, role: MegatronRoleConfig) -> RoleSettings:
        return RoleSettings(
            folder=self.config.model_folder(group.role),
            layout=group.layout,
            dtype=self.config.run.dtype,
            micro_batch_tokens=role.micro_batch_tokens,
            scalar_head=group.role == "critic",
            optimizer=None if group.role == "reference" else self.config.ppo.optimizer,
            timeout_s=self.config.run.timeout_s,
            recompute=role.recompute,
            fp8=role.fp8,
            offload=role.offload,
        )

    def _engine_settings(self) -> EngineSettings:
        config, rollout = self.config, self.config.roles.rollout
        return EngineSettings(
            folder=config.model_folder("actor"),
            tp=rollout.tp,
            dtype=config.run.dtype,
            max_tokens=config.data.max_prompt + config.data.max_response,
            max_sequences=rollout.max_sequences,
            memory_fraction=rollout.memory_fraction,
            kv_cache_gib=rollout.kv_cache_gib,
            on_cuda=config.run.device == "cuda",
            sleep=rollout.sleep if self._engines_sleep else "off",
            seed=config.run.seed,
        )

    def _connect(self) -> None:
        """Form the transfer group of actor and engines, and prove that weights will land where they belong."""
        transfer = TransferSpec(
            model=read_model_spec(self.config.model_folder("actor")),
            actor=self._layouts["actor"],
            engines=len(self.rollout.members),
            engine_tp=self.config.roles.rollout.tp,
            fused_norms=self.config.run.device == "cuda",
            places=tuple(self._places()),
            forward=True,
        )
        ((host, port),) = self.gather(self._host_store(self.actor))
        rollout = self.config.roles.rollout
        limit_s = PEERS_FIRST * self.config.run.timeout_s
        meeting = Meeting(host, port, limit_s, rollout.verify, rollout.transport)
        receivers = self.rollout.ask("join_transfer", lambda engine: (transfer, engine, meeting))
        senders = self.actor.each("join_transfer", lambda _: ("actor", transfer, meeting))
        engines, actors = self.gather(receivers, senders)
        shown = {**dict(actors), **{rank: mark for engine in engines for rank, mark in engine.items()}}
        if reason := disagreement(shown):
            raise WeightMismatch(reason)
        first = RolloutGroup(self.rollout.members[:1], self.calls)  # the others run the same code
        (lines_by_engine,) = self.gather(first.ask("probe", lambda _: (transfer,)))
        if differences := [line for lines in lines_by_engine for line in lines]:
            raise WeightMismatch("\n".join(differences))
        self._on_device = self.config.run.device == "cuda" and transfer.stays_on_device()
        if self._on_device:
            self._planned_bytes = (4 if self.config.run.dtype == "float32" else 2) * transfer.elements()

    def _places(self) -> Iterator[tuple[str, str]]:
        """(node, device) of each rank of the transfer group; CPU processes count as devices of their own."""
        on_cuda, tp = self.config.run.device == "cuda", self.config.roles.rollout.tp
        for rank, member in enumerate(self.actor.members):
            yield member.place.node, member.device if on_cuda else f"actor {rank}"
        for engine, member in enumerate(self.rollout.members):
            devices = member.device.split(",") if on_cuda else [f"engine {engine}.{at}" for at in range(tp)]
            yield from ((member.place.node, device) for device in devices)
