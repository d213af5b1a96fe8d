"""Starting the processes of a run, and learning where they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megappo.cluster.actors import MegatronProcess, RewardProcess, RolloutProcess, StreamingProcess
from megappo.cluster.calls import Calls, Pending, Place, one
from megappo.cluster.environment import engine_environment, worker_environment
from megappo.cluster.forks import Pythons
from megappo.cluster.groups import Group, Member
from megappo.cluster.pools import Pool, runtime
from megappo.cluster.watch import Address
from megappo.config import Config, Devices
from megappo.fit.devices import Device
from megappo.stack import StackError, Wanted


@dataclass(frozen=True)
class Starter:
    """Starts Megatron's processes on pools.

    Attributes:
        started: collects where those on pools are.
        pythons: see :class:`megappo.cluster.processes.Processes`.
    """

    config: Devices
    calls: Calls
    pools: Mapping[str, Pool]
    started: list[Address]
    pythons: Pythons

    def pool(self, name: str, pool: Pool) -> list[Member]:
        # One connection keeps the order in which Megatron overlaps communication with computation.
        environment = worker_environment(self.config, CUDA_DEVICE_MAX_CONNECTIONS="1")
        if self.config.run.device == "cuda":
            environment = {**flight_recorder(self._log_file(f"{name}-nccl-rank")), **environment}
        members = []
        for rank in range(pool.config.devices):
            log = self._log_file(f"{name}-rank{rank}")
            actor = pool.start(MegatronProcess, rank, 1, log, environment=environment, python=self.pythons.roles)
            members.append(Member(actor, Place(name, rank, name, "?", log)))
        return members

    def located(self, *started: list[Member]) -> list[tuple[Member, ...]]:
        """The same members, once they run, with their nodes and devices."""
        asked = [Group(tuple(members), self.calls).each("whereabouts", lambda _: ()) for members in started]
        answers = self.calls.gather(*asked)
        for members, found in zip(started, answers, strict=True):
            # Those of rewards are on no pool, and end only with the connection to Ray.
            self.started.extend(
                address for member, (address, _) in zip(members, found, strict=True) if member.place.pool in self.pools
            )
        return [
            tuple(
                Member(member.actor, replace(member.place, node=address.host, watch=address), device)
                for member, (address, device) in zip(members, found, strict=True)
            )
            for members, found in zip(started, answers, strict=True)
        ]

    def check_stacks(self, *processes: tuple[tuple[Member, ...], tuple[Wanted, ...]]) -> None:
        """Whether processes have the packages that they are about to import.

        Raises:
            StackError: some do not.
        """

        def asking(group: tuple[Member, ...], wanted: tuple[Wanted, ...]) -> Pending[Any]:
            return Group(group, self.calls).each("stack_problems", lambda _: (wanted,))

        asked = [asking(*process) for process in processes]
        found = {
            f"node {member.place.node}: {problem}": None  # once a node
            for (group, _), answers in zip(processes, self.calls.gather(*asked), strict=True)
            for member, problems in zip(group, answers, strict=True)
            for problem in problems
        }
        if found:
            raise StackError(found)

    def join(self, members: Mapping[str, tuple[Member, ...]]) -> dict[str, list[Device]]:
        """Every pool becomes one torch.distributed world; its first process is the meeting point.

        Returns the devices of each pool, by rank.
        """
        run = self.config.run
        groups = [Group(pool, self.calls) for pool in members.values()]
        addresses = self.calls.gather(*[host_store(group, run.timeout_s) for group in groups])

        def joining(group: Group, host: str, port: int) -> Pending[Any]:
            world = len(group.members)
            return group.each("join", lambda rank: (rank, world, host, port, run.timeout_s, run.seed))

        joined = self.calls.gather(
            *[joining(group, *address) for group, address in zip(groups, addresses, strict=True)]
        )
        return dict(zip(members, joined, strict=True))

    def _log_file(self, name: str) -> str:
        return str((self.config.run.folder / "logs" / f"{name}.log").resolve())


@dataclass(frozen=True)
class RunStarter(Starter):
    """Starts the engines and the rewards of a run as well."""

    config: Config

    def engines(self) -> list[Member]:
        pool = self.pools[self.config.roles.rollout.pool]
        return [self.engine(index) for index in range(pool.config.devices // self.config.roles.rollout.tp)]

    def engine(self, index: int) -> Member:
        """One engine, on devices that no Megatron process has."""
        pool, tp = self.pools[self.config.roles.rollout.pool], self.config.roles.rollout.tp
        log = self._log_file(f"rollout-engine{index}")
        kind = StreamingProcess if self.config.ppo.streams else RolloutProcess
        environment = self._engine_environment()
        actor = pool.start(kind, index, tp, log, environment=environment, python=self.pythons.engines)
        return Member(actor, Place("rollout", index, pool.name, "?", log))

    def engines_beside(self, hosts: Sequence[Member]) -> list[Member]:
        """Engines on the devices of a pool's Megatron processes."""
        pool, tp = self.pools[self.config.roles.rollout.pool], self.config.roles.rollout.tp
        members = []
        for index in range(len(hosts) // tp):
            devices = [host.device for host in hosts[index * tp : (index + 1) * tp]]
            environment = self._engine_environment(CUDA_VISIBLE_DEVICES=",".join(devices))
            log, python = self._log_file(f"rollout-engine{index}"), self.pythons.engines
            actor = pool.start_beside(RolloutProcess, index * tp, tp, log, environment=environment, python=python)
            members.append(Member(actor, Place("rollout", index, pool.name, "?", log)))
        return members

    def _engine_environment(self, **more: str) -> dict[str, str]:
        # Where engines are not forked, they see to vLLM's variables by what is set on their own node.
        environment = worker_environment if self.pythons.engines is None else engine_environment
        return environment(self.config, **more)

    def rewards(self) -> list[Member]:
        log = self._log_file("reward")
        # On the driver's node, and without a reserved CPU: pools may have reserved them all.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        environment = worker_environment(self.config, CUDA_VISIBLE_DEVICES="")
        remote: Any = ray.remote(RewardProcess)
        options = {"num_cpus": 0, "scheduling_strategy": here, "runtime_env": runtime(environment, self.pythons.roles)}
        return [Member(remote.options(**options).remote(log), Place("reward", 0, "driver", "?", log))]

    def engine_devices(self, engines: tuple[Member, ...]) -> list[Device]:
        """Devices of a pool that engines have for themselves."""
        (found,) = self.calls.gather(Group(engines, self.calls).each("devices", lambda _: ()))
        return [device for devices in found for device in devices]


def flight_recorder(file: str) -> dict[str, str]:
    """Have PyTorch remember the last collectives of a process, and write them when NCCL's own limit expires.

    Args:
        file: the beginning of its name; the rank is added.
    """
    size = "2000"
    return {
        **{"TORCH_FR_BUFFER_SIZE": size, "TORCH_NCCL_TRACE_BUFFER_SIZE": size, "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"},
        **{"TORCH_FR_DUMP_TEMP_FILE": file, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": file},
    }


def host_store(group: Group, timeout_s: float) -> Pending[tuple[str, int]]:
    """Ask the first process of a group to open a meeting point: its host and port."""
    return Group(group.members[:1], group.calls).each("host_store", lambda _: (timeout_s,), one)
