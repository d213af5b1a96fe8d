"""Whether the devices of a run have the memory that its roles need: known before a model is loaded.

Plain Python, so that it can be asked about devices that are not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import ceil

from megappo.config import SCALAR_HEAD, TRAINED, Config, Devices, MegatronRoleConfig, PoolConfig
from megappo.fit.communicators import pool_communicators
from megappo.layout.engine_memory import EngineMemory, engine_memory
from megappo.layout.memory import CONTEXT, GIB, WORKSPACE, RoleMemory, RoleUse, parts, role_memory
from megappo.layout.mesh import Layout
from megappo.models.parameters import megatron_vocabulary, vllm_vocabulary
from megappo.models.spec import ModelSpec, read_model_spec, with_lora

CHUNK_BYTES = 512 << 20
"""As :data:`megappo.models.language_head.CHUNK_BYTES`, which cannot be imported without torch."""


class DeviceTooSmall(RuntimeError):
    """A pool's devices do not have the memory that the configuration needs; ``problems`` has a text for each lack."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True)
class Device:
    """A device as a process on it sees it.

    Attributes:
        name: as CUDA has it; "cpu" for a CPU process.
        total, free: bytes of its memory; 0 on CPU.
        node: that it is in, in words.
        node_memory: bytes that the node has for the process; 0 where that is not known.
    """

    name: str
    total: int = 0
    free: int = 0
    node: str = ""
    node_memory: int = 0


@dataclass(frozen=True)
class Turn:
    """A time at which one role of a pool works on a device and the others rest there.

    Attributes:
        doing: in words.
        uses: bytes on the device by whom (a role, or all processes) and what for.
        role: the Megatron role that works, if one does.
    """

    doing: str
    uses: Mapping[str, Mapping[str, int]]
    role: str = ""

    @property
    def need(self) -> int:
        """Bytes in all."""
        return sum(sum(use.values()) for use in self.uses.values())


def check_fit(config: Config, devices: Mapping[str, Sequence[Device]]) -> None:
    """Compare what every pool needs with what is there.

    Args:
        devices: of each pool, in the order of its ranks, as one process on each sees them before anything is loaded.

    Raises:
        DeviceTooSmall: naming each role, its parts and the ways out, for every pool that lacks memory.
    """
    found = [problem for pool in devices for problem in _problems(config, pool, devices[pool])]
    if found:
        raise DeviceTooSmall(found)


def pool_turns(config: Config, pool: str, rank: int, total: int, length: float | None = None) -> Iterator[Turn]:
    """Every turn of a pool, on the device of one rank.

    Args:
        total: bytes of that device's memory.
        length: as for :func:`stage_memory`.
    """
    rollout, roles = config.roles.rollout, _roles(config, pool)
    memory = {name: megatron_memory(config, name, rank, length) for name in roles}
    resting = {name: memory[name].resting(role.offload) for name, role in roles.items()}
    has_engine = rollout.pool == pool
    awake = {"rollout": {"memory_fraction": int(rollout.memory_fraction * total)}} if has_engine else {}
    engine_rests = bool(roles) and rollout.sleep != "off"
    fixed = {"contexts": (bool(roles) + has_engine) * CONTEXT, "workspaces": WORKSPACE}
    layouts = {name: role_layout(config, name) for name in roles}
    if nccl := pool_communicators(config, pool, layouts, role_layout(config, "actor")):
        fixed["NCCL"] = nccl
    common: dict[str, Mapping[str, int]] = {"all processes": fixed}
    for name, own in memory.items():
        others = {**common, **resting, **({} if engine_rests else awake)}
        scoring = {"weights": own.weights, **resting[name], "scoring": own.scoring}
        yield Turn(f"scoring by the {name}", {**others, name: scoring}, name)
        if own.gradients:
            update = {part: size for part, size in parts(own) if part != "scoring"}
            yield Turn(f"updating the {name}", {**others, name: update}, name)
    # Only where roles offload is what torch's allocator keeps for the next step given back to the device.
    keeps = memory and all(role.offload == "none" for role in roles.values())
    cache = max(max(own.activations + own.backward, own.scoring) for own in memory.values()) if keeps else 0
    common = {"all processes": {**fixed, "cache": cache} if cache else fixed}
    if has_engine:
        yield Turn("generating", {**common, **resting, **awake})
    if has_engine and engine_rests and "actor" in roles:
        both = {"actor": {"weights": memory["actor"].weights, **resting["actor"]}}
        both["rollout"] = {"weights": rollout_memory(config).weights}
        yield Turn("giving the engine the actor's weights", {**common, **resting, **both})


def megatron_memory(config: Config, name: str, rank: int, length: float | None = None) -> RoleMemory:
    """What a Megatron role takes on the device of one rank of its pool."""
    layout, spec = role_layout(config, name), read_model_spec(config.model_folder(name))
    stage = layout.coordinates(rank)["pp"]
    return stage_memory(config, name, config.roles.megatron[name], layout, stage, spec, length)


def stage_memory(
    config: Config,
    name: str,
    role: MegatronRoleConfig,
    layout: Layout,
    stage: int,
    spec: ModelSpec,
    length: float | None = None,
) -> RoleMemory:
    """What a Megatron role takes on each device of a pipeline stage, were it laid out in this way.

    Args:
        length: tokens that a sequence has, which the packing spreads evenly over micro-batches; without it, whatever
            lengths there are: the longest rows that fill a micro-batch to its budget.
    """
    longest = config.data.max_prompt + config.data.max_response - 1  # the last token predicts nothing
    adapters = with_lora(spec, role.lora).layer_adapters(role.tp)

    def use(rows: int) -> RoleUse:
        own = -(-rows // layout.dp)
        tokens = own * longest
        micro_batches, largest = -(-tokens // role.micro_batch_tokens), min(tokens, role.micro_batch_tokens)
        if length is not None:
            micro_batches = ceil(own / max(int(role.micro_batch_tokens // max(length, 1)), 1))
        micro_batches = layout.micro_batches(micro_batches)
        if length is not None:
            largest = ceil(ceil(own / micro_batches) * length)
        return RoleUse(
            vocabulary=megatron_vocabulary(spec.vocab_size, role.tp),
            item_bytes=item_bytes(config),
            trained=name in TRAINED,
            scalar_head=name in SCALAR_HEAD,
            tokens=largest,
            micro_batches=micro_batches,
            recompute=role.recompute,
            chunk_bytes=CHUNK_BYTES,
            adapters=adapters,
        )

    # Scoring goes over the whole batch of a step, whose micro-batches may be larger than those of a mini-batch.
    step = config.data.prompts_per_step * config.roles.rollout.samples_per_prompt
    scoring = role_memory(spec, layout, stage, use(step)).scoring
    return replace(role_memory(spec, layout, stage, use(config.ppo.mini_batch)), scoring=scoring)


def fullest_stage(config: Config, name: str, role: MegatronRoleConfig, layout: Layout, spec: ModelSpec) -> RoleMemory:
    """The most of each part that any stage takes, were the role laid out in this way."""
    stages = [stage_memory(config, name, role, layout, stage, spec) for stage in layout.unlike_stages]
    return RoleMemory(*(max(getattr(one, part.name) for one in stages) for part in fields(RoleMemory)))


def rollout_memory(config: Config) -> EngineMemory:
    """What an engine needs on each of its devices."""
    spec, rollout = read_model_spec(config.model_folder("actor")), config.roles.rollout
    return engine_memory(
        spec,
        rollout.tp,
        vocabulary=vllm_vocabulary(spec.vocab_size),
        item_bytes=item_bytes(config),
        max_tokens=config.data.max_prompt + config.data.max_response,
        max_sequences=rollout.max_sequences,
    )


def _roles(config: Config, pool: str) -> dict[str, MegatronRoleConfig]:
    return {name: role for name, role in config.roles.megatron.items() if role.pool == pool}


def role_layout(config: Config, name: str) -> Layout:
    """The sizes of a Megatron role; what its pool has beyond them is data parallel."""
    return layout_on(config.roles.megatron[name], config.pools)


def layout_on(role: MegatronRoleConfig, pools: Mapping[str, PoolConfig]) -> Layout:
    """The sizes of a role on its pool."""
    dp = pools[role.pool].devices // (role.tp * role.pp)
    return Layout(tp=role.tp, pp=role.pp, vpp=role.vpp, dp=dp, sequence_parallel=role.sequence_parallel)


def item_bytes(config: Devices) -> int:
    """Bytes of a weight or activation."""
    return 4 if config.run.dtype == "float32" else 2


# --- what is lacking -------------------------------------------------------------------------------------------------


def _problems(config: Config, pool: str, devices: Sequence[Device]) -> Iterator[str]:
    """The engine's share if it is too small, and the turn that lacks most on the device that lacks most."""
    if config.roles.rollout.pool == pool:
        yield from _share_problem(config, min(device.total for device in devices))
    layouts = [role_layout(config, name) for name in _roles(config, pool)]

    def turns(rank: int, total: int) -> Iterator[Turn]:
        return pool_turns(config, pool, rank, total)

    yield from turn_problems(pool, devices, layouts, turns, lambda turn: _ways_out(config, pool, turn))


def turn_problems(
    pool: str,
    devices: Sequence[Device],
    layouts: Sequence[Layout],
    turns: Callable[[int, int], Iterator[Turn]],
    ways_out: Callable[[Turn], Iterator[str]],
) -> Iterator[str]:
    """The turn that lacks most memory, on the device that lacks most, in words; nothing where none lacks any.

    Args:
        layouts: of the roles on the pool.
        turns: those on the device of a rank, which has that many bytes in all.
        ways_out: of a turn that lacks memory.
    """
    fullest: dict[tuple[int, ...], Turn] = {}  # ranks of the same stages need the same
    lacks: list[tuple[int, int, Turn]] = []
    for rank, device in enumerate(devices):
        kind = (device.total, *(layout.coordinates(rank)["pp"] for layout in layouts))
        if kind not in fullest:
            fullest[kind] = max(turns(rank, device.total), key=lambda turn: turn.need)
        lacks.append((fullest[kind].need - _there(device), rank, fullest[kind]))
    lack, rank, turn = max(lacks, key=lambda found: found[0])
    if lack > 0:
        yield _turn_problem(pool, rank, devices[rank], turn, ways_out(turn))


def _there(device: Device) -> int:
    """Bytes for us: the context of the process that looked is already there, and is counted in every turn."""
    return min(device.free + CONTEXT, device.total)


def _share_problem(config: Config, total: int) -> Iterator[str]:
    fraction, engine = config.roles.rollout.memory_fraction, rollout_memory(config)
    if engine.least <= fraction * total:
        return
    names = {"sequence": "key/value cache of one sequence", "working": "forward pass and sampler"}
    least = engine.least / total
    raised = [f"roles.rollout.memory_fraction of at least {least + 0.005:.2f}"] if least < 0.99 else []
    yield (
        f"roles.rollout.memory_fraction: {fraction:g} of a device of {_gib(total)} GiB is {_gib(fraction * total)} "
        f"GiB, and an engine needs {_gib(engine.least)} GiB: "
        + ", ".join(f"{names.get(part, part)} {_gib(size)}" for part, size in parts(engine))
        + f"; ways out: {'; '.join([*raised, 'more roles.rollout.tp', 'fewer roles.rollout.max_sequences'])}"
    )


def _turn_problem(pool: str, rank: int, device: Device, turn: Turn, ways_out: Iterator[str]) -> str:
    lines = [
        f"pools.{pool}: {turn.doing} needs {_gib(turn.need)} GiB on device {rank} ({device.name}), which has "
        f"{_gib(_there(device))} of its {_gib(device.total)} GiB to give:"
    ]
    for who, use in sorted(turn.uses.items(), key=lambda item: -sum(item[1].values())):
        detail = ", ".join(f"{part} {_gib(size)}" for part, size in use.items())
        lines.append(f"  {who}: {_gib(sum(use.values()))} GiB" + (f" ({detail})" if detail else ", offloaded"))
    return "\n".join([*lines, "  ways out: " + "; ".join(ways_out)])


def _ways_out(config: Config, pool: str, turn: Turn) -> Iterator[str]:
    roles, rollout = _roles(config, pool), config.roles.rollout
    longest = config.data.max_prompt + config.data.max_response
    if working := roles.get(turn.role):
        if "activations" in turn.uses[turn.role] and working.recompute != "full":
            choices = "selective or full" if working.recompute == "none" else "full"
            yield f"roles.{turn.role}.recompute={choices}"
        if working.micro_batch_tokens > longest:
            yield f"roles.{turn.role}.micro_batch_tokens below {working.micro_batch_tokens} (at least {longest})"
    for name in roles:
        if name != turn.role and (rests := turn.uses[name]):
            yield f"roles.{name}.offload={'optimizer or all' if 'optimizer' in rests else 'all'}"
    if "memory_fraction" in turn.uses.get("rollout", {}):
        yield f"roles.rollout.memory_fraction below {rollout.memory_fraction:g}"
        if working:
            yield "roles.rollout.sleep=drop or offload"
    if roles:
        yield "more tp or pp, or more devices in the pool"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"
