"""The best way for given roles to share a pool: their layouts, what they offload, the engines' share of a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product

from megappo.config import Config, MegatronRoleConfig, Offload, PoolConfig, Recompute, RolloutConfig, Sleep
from megappo.fit.devices import fullest_stage, rollout_memory
from megappo.layout.communicators import group_memory, pair_memory, with_library
from megappo.layout.devices import DeviceProfile
from megappo.layout.engine_memory import EngineMemory
from megappo.layout.legality import divisors, fp8_problems, megatron_tp, rollout_tp
from megappo.layout.memory import CONTEXT, GIB, WORKSPACE, RoleMemory
from megappo.layout.mesh import Layout
from megappo.layout.timeline import GENERATE, Phase
from megappo.models.parameters import vllm_vocabulary
from megappo.models.spec import read_model_spec
from megappo.plan.estimate import UPDATES, Workload, engine_rest_phases, role_phases, rollout_phase, with_offload

KEPT = 6
"""Layouts of a role that are tried together with those of others in its pool."""
MOST_STAGES = 16
MARGIN = 0.95
"""Of a device's memory, what a layout may be planned to take: estimates are good to 5%."""
SHARES = 20
"""An engine's share of a device is a multiple of one part in so many."""
SYNC_PEERS = 32
"""In the weight sync, before anybody knows the layouts at both of its ends: more than two hardly matter."""


@dataclass(frozen=True)
class Choice:
    """A role laid out on some devices: seconds of its phases, memory of its fullest stage, part by part, and bytes of
    its communicators."""

    role: MegatronRoleConfig
    phases: Mapping[str, Phase]
    memory: RoleMemory
    communicators: int

    @cached_property
    def seconds(self) -> float:
        """Of all phases."""
        return sum(phase.seconds for phase in self.phases.values())

    @cached_property
    def resting(self) -> int:
        """Bytes while others work."""
        return sum(self.memory.resting(self.role.offload).values())

    @cached_property
    def passing(self) -> int:
        """Bytes that a pass takes and gives back."""
        return max(self.memory.activations + self.memory.backward, self.memory.scoring)

    @cached_property
    def working(self) -> int:
        """Bytes at most while it works."""
        own = self.memory
        state = 0 if self.role.offload != "none" else own.gradients + own.optimizer
        scoring = own.weights + state + own.scoring
        return max(scoring, own.weights + own.gradients + own.optimizer + own.activations + own.backward)


@dataclass(frozen=True)
class Sharing:
    """How roles share a pool: seconds of their phases, and their sections of a configuration."""

    phases: Mapping[str, float]
    roles: Mapping[str, MegatronRoleConfig]
    rollout: RolloutConfig | None = None

    @cached_property
    def seconds(self) -> float:
        """Of all phases, one after the other."""
        return sum(self.phases.values())


@dataclass(frozen=True)
class Lack:
    """Devices that were too small, and by how little at best."""

    bytes: int
    text: str


class PoolSearch:
    """Searches pools for one configuration; remembers what it found.

    Attributes:
        tried: layouts that were looked at.
        lacks: by roles and devices, how little was lacking where nothing fits.
    """

    def __init__(self, config: Config, device: DeviceProfile, work: Workload, per_node: int) -> None:
        self.config, self.device, self.work, self.per_node = config, device, work, per_node
        self.specs = {name: read_model_spec(config.model_folder(name)) for name in config.roles.megatron}
        self.room = int(MARGIN * device.memory)
        self.few = len(self.specs) > 3  # what is tried together grows with the power of the roles
        self.tried = 0
        self.lacks: dict[tuple[tuple[str, ...], int], Lack] = {}
        self.best = cache(self._best)
        self.choices = cache(self._choices)
        self.engine = cache(self._engine)
        self.engine_sizes = cache(self._engine_sizes)

    def pool(self, devices: int) -> PoolConfig:
        """Full nodes, or a part of one."""
        return PoolConfig(nodes=max(devices // self.per_node, 1), devices_per_node=min(devices, self.per_node))

    def _best(self, names: tuple[str, ...], devices: int) -> Sharing | None:
        """The quickest way for these roles (``rollout`` may be one) to share so many devices, if they fit."""
        megatron = tuple(name for name in names if name != "rollout")
        offloads: tuple[Offload, ...] = ("none", "optimizer", "all") if len(names) > 1 else ("none",)
        best: Sharing | None = None
        at_least = self._quickest_engine(devices, bool(megatron)) if "rollout" in names else 0.0
        for offload in offloads:
            lists = [self.choices(name, devices, offload) for name in megatron]
            combinations = sorted(product(*lists), key=lambda choices: sum(choice.seconds for choice in choices))
            for choices in combinations:
                if choices and best and sum(choice.seconds for choice in choices) + at_least >= best.seconds:
                    break
                for sharing in self._fitting(names, megatron, choices, devices):
                    if best is None or sharing.seconds < best.seconds:
                        best = sharing
                if best and "rollout" not in names:
                    break
        return best

    # --- a role ----------------------------------------------------------------------------------------------------

    def _choices(self, name: str, devices: int, offload: Offload) -> list[Choice]:
        """Layouts worth a try together with other roles' ones."""
        if offload == "none":
            return self._kept(list(self._every_choice(name, devices)))
        return [
            Choice(
                replace(choice.role, offload=offload),
                with_offload(self.config, name, offload, choice.memory, choice.phases, self.device, self.work),
                choice.memory,
                choice.communicators,
            )
            for choice in self.choices(name, devices, "none")
        ]

    def _every_choice(self, name: str, devices: int) -> Iterator[Choice]:
        given, spec = self.config.roles.megatron[name], self.specs[name]
        longest = self.config.data.max_prompt + self.config.data.max_response
        recomputes: tuple[Recompute, ...] = ("none", "selective", "full") if name in UPDATES else ("none",)
        budgets = sorted({max(given.micro_batch_tokens // part, longest) for part in (1, 4)}, reverse=True)
        for tp in megatron_tp(spec):
            if tp > self.per_node or devices % tp or list(fp8_problems(spec, tp, given.fp8, tp > 1)):
                continue
            for pp in divisors(devices // tp):
                layout = Layout(tp=tp, pp=pp, dp=devices // (tp * pp), sequence_parallel=tp > 1)
                if pp > min(spec.num_layers, MOST_STAGES) or layout.dp > self.config.ppo.mini_batch:
                    continue
                for recompute, budget in product(recomputes, budgets if pp > 1 else budgets[:1]):
                    role = replace(given, tp=tp, pp=pp, sequence_parallel=tp > 1, micro_batch_tokens=budget)
                    role = replace(role, vpp=1, recompute=recompute, offload="none")
                    self.tried += 1
                    memory = fullest_stage(self.config, name, role, layout, spec)
                    phases = role_phases(self.config, name, role, layout, spec, self.device, self.work)
                    yield Choice(role, phases, memory, group_memory(layout, trained=name in UPDATES))

    def _kept(self, choices: Sequence[Choice]) -> list[Choice]:
        """The quickest, and those that take least beside others or alone."""
        by_time = sorted(choices, key=lambda choice: choice.seconds)
        fitting = [one for one in by_time if one.working + CONTEXT + WORKSPACE + one.communicators <= self.room]
        small = sorted(choices, key=lambda choice: (choice.resting, choice.seconds))
        smallest = sorted(choices, key=lambda choice: (choice.working, choice.seconds))
        most, least = (KEPT // 2, 1) if self.few else (KEPT, 2)
        return list({id(one): one for one in (*fitting[:most], *small[:least], *smallest[:least])}.values())

    # --- together --------------------------------------------------------------------------------------------------

    def _fitting(
        self, names: tuple[str, ...], megatron: tuple[str, ...], choices: Sequence[Choice], devices: int
    ) -> Iterator[Sharing]:
        """This combination with every share and tensor-parallel size of the engines, if it fits."""
        resting = sum(choice.resting for choice in choices)
        contexts = bool(megatron) + ("rollout" in names)
        fixed = contexts * CONTEXT + WORKSPACE + self._communicators(names, choices, devices)
        peak = max((resting - one.resting + one.working for one in choices), default=0) + fixed
        if not self._enough(names, devices, peak):
            return
        phases = {key: phase.seconds for choice in choices for key, phase in choice.phases.items()}
        roles = {name: choice.role for name, choice in zip(megatron, choices, strict=True)}
        if "rollout" not in names:
            yield Sharing(phases, roles)
            return
        kept = choices and all(choice.role.offload == "none" for choice in choices)
        torch_keeps = max((one.passing for one in choices), default=0) if kept else 0
        given = self.config.roles.rollout
        asleep: Sleep = "drop" if given.sleep == "off" else given.sleep
        # Engines with devices of their own never sleep, whatever is configured: then the default is.
        ways: list[tuple[Sleep, int]] = [(asleep, 0), ("off", peak)] if megatron else [("drop", 0)]
        idle = resting + fixed + torch_keeps
        for sleep, beside in ways:
            taken = max(idle, beside)
            share = min(int((self.room - taken) / self.device.memory * SHARES) / SHARES, 0.9)
            for tp in self.engine_sizes(devices):
                rollout, engine, generating = self.engine(tp, share, sleep, devices, bool(megatron))
                if self._enough(names, devices, taken + engine.least) and share * self.device.memory >= engine.least:
                    yield Sharing(phases | generating, roles, rollout)

    def _communicators(self, names: tuple[str, ...], choices: Sequence[Choice], devices: int) -> int:
        """Bytes on a device, with those of the weight sync unless one device is all there is."""
        sends = "actor" in names and not ("rollout" in names and devices == 1)
        training = sum(choice.communicators for choice in choices) + sends * pair_memory(SYNC_PEERS, receives=False)
        receives = "rollout" in names and not ("actor" in names and devices == 1)
        serving = receives * pair_memory(SYNC_PEERS, receives=True)
        return with_library(training, serving)

    def _engine(
        self, tp: int, share: float, sleep: Sleep, devices: int, shared: bool
    ) -> tuple[RolloutConfig, EngineMemory, dict[str, float]]:
        """An engine, its memory, and seconds of generation and of sleep, in a pool that it shares with the actor or
        not.

        For estimates, the actor stands for anyone; other roles are out of the way.
        """
        self.tried += 1
        config = self.config
        rollout = replace(config.roles.rollout, tp=tp, memory_fraction=max(share, 0.01), sleep=sleep)
        actor = replace(config.roles.actor, pool=rollout.pool if shared else "")
        roles = replace(config.roles, actor=actor, critic=None, reference=None, rollout=rollout)
        config = replace(config, roles=roles, pools={rollout.pool: self.pool(devices)})
        phases = {GENERATE: rollout_phase(config, self.device, self.work), **engine_rest_phases(config, self.device)}
        return rollout, rollout_memory(config), {key: phase.seconds for key, phase in phases.items()}

    def _quickest_engine(self, devices: int, shared: bool) -> float:
        """Seconds that engines take at least, whatever they have of the devices' memory."""
        shares = [number / SHARES for number in range(SHARES + 1) if number / SHARES <= 0.9] + [0.9]
        ways = product(self.engine_sizes(devices), shares)
        return min(sum(self.engine(tp, share, "off", devices, shared)[2].values()) for tp, share in ways)

    def _engine_sizes(self, devices: int) -> list[int]:
        spec = self.specs["actor"]
        within = self.pool(devices).devices_per_node
        return [tp for tp in rollout_tp(spec, vllm_vocabulary(spec.vocab_size)) if within % tp == 0]

    def _enough(self, names: tuple[str, ...], devices: int, need: int) -> bool:
        lack = need - self.room
        if lack <= 0:
            return True
        known = self.lacks.get((names, devices))
        if known is None or lack < known.bytes:
            text = (
                f"{', '.join(names)} on {devices} device{'s' * (devices != 1)}: at best {need / GIB:.1f} GiB a device, "
                f"{lack / GIB:.1f} GiB more than {MARGIN:.0%} of the {self.device.memory / GIB:.1f} GiB of "
                f"{self.device.name}"
            )
            self.lacks[names, devices] = Lack(lack, text)
        return False
