"""How long each phase of a step should take, from a configuration and a device profile."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import ceil

from megappo.config import SCALAR_HEAD, Config, MegatronRoleConfig
from megappo.fit.devices import fullest_stage, item_bytes, role_layout, rollout_memory
from megappo.layout import passes
from megappo.layout.devices import DeviceProfile
from megappo.layout.generation import Load, cached_sequences, generation_phase
from megappo.layout.memory import RoleMemory
from megappo.layout.mesh import Layout
from megappo.layout.timeline import ADVANTAGES, GENERATE, SLEEP, SYNC, WAKE, Busy, Phase, timeline, total
from megappo.models.parameters import megatron_vocabulary, vllm_vocabulary
from megappo.models.spec import ModelSpec, read_model_spec, with_lora

ADVANTAGE_S = 0.14e-6
"""Seconds of the driver for each token: reading columns, advantages, writing them (seen: 0.027 s for 196 thousand)."""
SLEEP_S, WAKE_S = 1.3, 0.07
"""Seconds in which vLLM gives up its memory and takes it back, beside what is copied (seen on an H200)."""
HOST, MAPPING = "host memory", "giving memory up and back"

SCORES = {"actor": "old_log_prob", "critic": "values", "reference": "ref", "reward": "reward_model"}
UPDATES = {"actor": "update_actor", "critic": "update_critic"}


@dataclass(frozen=True)
class Workload:
    """What a step is made of.

    Attributes:
        sequences: responses.
        prompt, response: tokens of one, on average.
        longest: tokens of the longest response.
        rounds: responses that are drawn, and judged by a reward model, one round after another, those that nothing is
            trained on included; empty: those of the batch, at once.
        judged: the part of them that a reward model judges; it has none in the scores of the others.
        updated: what the updates go over, where that is not the whole batch.
    """

    sequences: int
    prompt: float
    response: float
    longest: float
    rounds: tuple[int, ...] = ()
    judged: float = 1.0
    updated: Workload | None = None

    @property
    def tokens(self) -> float:
        """Prompts and responses."""
        return self.sequences * (self.prompt + self.response)

    @property
    def each_round(self) -> tuple[Workload, ...]:
        """The rounds by themselves; their responses are as long as the batch's."""
        return tuple(replace(self, sequences=sequences, rounds=()) for sequences in self.rounds or (self.sequences,))

    def in_updates(self, mini_batch: int) -> tuple[Workload, int]:
        """(what the updates go over, rows of each step): mini-batches keep their number, and lose what does not train.

        Args:
            mini_batch: rows of a step before that.
        """
        updated = self.updated or self
        return updated, max(-(-mini_batch * updated.sequences // self.sequences), 1)


@dataclass(frozen=True)
class Estimate:
    """A step, predicted.

    Attributes:
        phases: by the names of a run's ``timing_s``.
        busy: which pool works when.
    """

    phases: Mapping[str, Phase]
    busy: tuple[Busy, ...]

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return max((one.ended for one in self.busy), default=0.0)


def full_workload(config: Config) -> Workload:
    """Every prompt and every response as long as it may be."""
    data = config.data
    sequences = data.prompts_per_step * config.roles.rollout.samples_per_prompt
    rounds = (sequences, data.prompts_per_step) if config.ppo.needs_greedy else ()
    return Workload(sequences, data.max_prompt, data.max_response, data.max_response, rounds)


def on_nodes(config: Config, device: DeviceProfile) -> DeviceProfile:
    """The device in nodes as wide as the configuration's: those of its pools on several nodes, or that have more."""
    spread = [pool.devices_per_node for pool in config.pools.values() if pool.nodes > 1]
    widest = max(pool.devices_per_node for pool in config.pools.values())
    return replace(device, devices_per_node=max(spread) if spread else max(device.devices_per_node, widest))


def in_pool(config: Config, pool: str, device: DeviceProfile) -> DeviceProfile:
    """The device among as many neighbours as the pool has on a node."""
    return replace(device, devices_per_node=config.pools[pool].devices_per_node)


def estimate(
    config: Config, device: DeviceProfile, work: Workload, sync: Phase, *, done: Collection[str] | None = None
) -> Estimate:
    """Predict a step.

    Args:
        sync: of the weights; see :func:`megappo.plan.sync.weight_sync`.
        done: the phases that the step has, where those are known; all that the configuration has by default.
    """
    phases = {
        GENERATE: rollout_phase(config, in_pool(config, config.roles.rollout.pool, device), work),
        **engine_rest_phases(config, device),
        ADVANTAGES: Phase({"the driver": ADVANTAGE_S * work.tokens}),
        SYNC: sync,
    }
    for name, role in config.roles.megatron.items():
        spec, layout = read_model_spec(config.model_folder(name)), role_layout(config, name)
        memory = fullest_stage(config, name, role, layout, spec)
        plain = role_phases(config, name, role, layout, spec, in_pool(config, role.pool, device), work)
        phases |= with_offload(config, name, role.offload, memory, plain, device, work)
    pools = {name: role.pool for name, role in config.roles.megatron.items()}
    if config.reference_is_base:
        phases[SCORES["reference"]], pools["reference"] = phases[SCORES["actor"]], pools["actor"]
    pools["rollout"] = config.roles.rollout.pool
    if done is not None:
        phases = {name: phase for name, phase in phases.items() if name in done}
    return Estimate(phases, tuple(timeline(phases, pools, overlapped=config.ppo.staleness > 0)))


def role_phases(
    config: Config,
    name: str,
    role: MegatronRoleConfig,
    layout: Layout,
    spec: ModelSpec,
    device: DeviceProfile,
    work: Workload,
) -> dict[str, Phase]:
    """Scoring and, if it is trained, updating, were the role laid out in this way and never offloaded."""
    use = passes.PassUse(
        vocabulary=megatron_vocabulary(spec.vocab_size, role.tp),
        item_bytes=item_bytes(config),
        scalar_head=name in SCALAR_HEAD,
        recompute=role.recompute,
        micro_batch_tokens=role.micro_batch_tokens,
        length=work.prompt + work.response - 1,
        head_tokens=work.response,
        adapters=with_lora(spec, role.lora).layer_adapters(role.tp),
    )
    calls = [one.sequences for one in work.each_round] if name == "reward" else [work.sequences]
    share = work.judged if name == "reward" else 1.0
    scoring = [passes.scoring_phase(spec, layout, use, device, max(ceil(share * sequences), 1)) for sequences in calls]
    out = {SCORES[name]: total(scoring)}
    if name in UPDATES:
        own, mini_batch = work.in_updates(config.ppo.mini_batch)
        use = replace(use, length=own.prompt + own.response - 1, head_tokens=own.response)
        sizes = {"mini_batch": mini_batch, "epochs": config.ppo.passes(name)}
        out[UPDATES[name]] = passes.update_phase(spec, layout, use, device, own.sequences, **sizes)
    return out


def with_offload(
    config: Config,
    name: str,
    offload: str,
    memory: RoleMemory,
    phases: Mapping[str, Phase],
    device: DeviceProfile,
    work: Workload,
) -> dict[str, Phase]:
    """The same phases with the copies from and to host memory around them.

    Weights come for every turn and go back when they have changed; the optimizer's state comes while the first
    mini-batch computes, which hides as much of it, and goes back after the last. Gradients are not copied.
    """
    if offload == "none":
        return dict(phases)
    link = device.host_gb_s * 1e9
    weights = memory.weights / link if offload == "all" else 0.0
    out = {SCORES[name]: total([phases[SCORES[name]], Phase({HOST: weights})])}
    if name in UPDATES:
        update, state = phases[UPDATES[name]], memory.optimizer / link
        own, mini_batch = work.in_updates(config.ppo.mini_batch)
        steps = -(-own.sequences // mini_batch) * config.ppo.passes(name)
        moved = 2 * weights + state + max(state - update.seconds / steps, 0.0)
        out[UPDATES[name]] = total([update, Phase({HOST: moved})])
    return out


def rollout_slots(config: Config, device: DeviceProfile) -> int:
    """Sequences that one engine decodes at once: as many as asked for, or as its key/value cache holds."""
    rollout = config.roles.rollout
    share = int(rollout.memory_fraction * device.memory)
    return min(rollout.max_sequences, cached_sequences(rollout_memory(config), share))


def rollout_phase(config: Config, device: DeviceProfile, work: Workload) -> Phase:
    """Generation, by all engines at the same time; one round after another."""
    if work.rounds:
        return total([rollout_phase(config, device, one) for one in work.each_round])
    spec, rollout = read_model_spec(config.model_folder("actor")), config.roles.rollout
    engines = config.pools[rollout.pool].devices // rollout.tp
    sequences = -(-work.sequences // engines)
    ready = sequences * (config.ppo.staleness if config.ppo.streams else 1)
    slots = min(rollout_slots(config, device), ready)
    load = Load(sequences, slots, work.prompt, work.response, work.longest, streams=config.ppo.streams)
    vocabulary = vllm_vocabulary(spec.vocab_size)
    return generation_phase(spec, rollout.tp, rollout_memory(config), vocabulary, item_bytes(config), load, device)


def validation_phase(config: Config, device: DeviceProfile, work: Workload, prompts: int) -> Phase:
    """Generation for so many prompts of a validation, whose responses are as long as a step's."""
    whole = replace(config, ppo=replace(config.ppo, staleness=0))
    sequences = prompts * config.roles.rollout.validation_samples
    device = in_pool(config, config.roles.rollout.pool, device)
    return rollout_phase(whole, device, replace(work, sequences=sequences, rounds=()))


def engine_rest_phases(config: Config, device: DeviceProfile) -> dict[str, Phase]:
    """Sleeping and waking of engines that share their devices."""
    rollout = config.roles.rollout
    shared = any(role.pool == rollout.pool for role in config.roles.megatron.values())
    if not shared or rollout.sleep == "off":
        return {}
    # Weights that went to the host are not brought back: the weight sync writes them.
    copied = rollout_memory(config).weights / (device.host_gb_s * 1e9) if rollout.sleep == "offload" else 0.0
    return {SLEEP: Phase({MAPPING: SLEEP_S, HOST: copied}), WAKE: Phase({MAPPING: WAKE_S, HOST: copied})}
