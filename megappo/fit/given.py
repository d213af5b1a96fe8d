"""Whether devices and nodes have the memory for given responses: ``megappo score``, ``sft`` and ``reward-train``.

As :mod:`megappo.fit.devices` and :mod:`megappo.fit.host` for a run, without engines; of ``score``, whose roles do not
train, and of the others, whose only role does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from megappo.config import SCALAR_HEAD, Config, Devices, MegatronRoleConfig, SupervisedConfig
from megappo.fit.devices import (
    CHUNK_BYTES,
    Device,
    DeviceTooSmall,
    Turn,
    item_bytes,
    layout_on,
    role_layout,
    turn_problems,
)
from megappo.fit.host import SAVED, away, node_problems, saved
from megappo.layout.communicators import group_memory, with_library
from megappo.layout.memory import CONTEXT, WORKSPACE, RoleMemory, RoleUse, parts, role_memory
from megappo.layout.mesh import Layout
from megappo.models.parameters import megatron_vocabulary
from megappo.models.spec import read_model_spec, with_lora

SCORING = ("actor", "reference", "reward")
"""The Megatron roles that score given responses."""


def _common(layouts: Iterable[Layout], *, trained: bool) -> dict[str, dict[str, int]]:
    fixed = {"contexts": CONTEXT, "workspaces": WORKSPACE}
    if nccl := with_library(sum(group_memory(layout, trained=trained) for layout in layouts)):
        fixed["NCCL"] = nccl
    return {"all processes": fixed}


def scoring_roles(config: Config) -> dict[str, MegatronRoleConfig]:
    """Those of the configuration that score given responses."""
    return {name: role for name, role in config.roles.megatron.items() if name in SCORING}


def check_scoring_fit(
    config: Config, roles: Mapping[str, MegatronRoleConfig], devices: Mapping[str, Sequence[Device]]
) -> None:
    """Compare what roles that only score need with what is there.

    Args:
        roles: :func:`scoring_roles` of the configuration.
        devices: as for :func:`megappo.fit.devices.check_fit`.

    Raises:
        DeviceTooSmall: naming each role, its parts and the ways out, for every pool that lacks memory, and for the
            node that lacks most.
    """
    problems: list[str] = []
    waits: dict[str, list[dict[str, int]]] = {}
    for pool, own in devices.items():
        here = {name: role for name, role in roles.items() if role.pool == pool}
        layouts = {name: role_layout(config, name) for name in here}

        def memory(rank: int, here: Mapping = here, layouts: Mapping = layouts) -> dict[str, RoleMemory]:
            return {
                name: _memory(
                    config, role, config.model_folder(name), layouts[name], rank, scalar_head=name in SCALAR_HEAD
                )
                for name, role in here.items()
            }

        def turns(
            rank: int, total: int, here: Mapping = here, layouts: Mapping = layouts, memory: Callable = memory
        ) -> Iterator[Turn]:
            held = memory(rank)
            resting = {name: held[name].resting(role.offload) for name, role in here.items()}
            for name in here:
                uses = {"weights": held[name].weights, **resting[name], "scoring": held[name].scoring}
                yield Turn(
                    f"scoring by the {name}", {**_common(layouts.values(), trained=False), **resting, name: uses}, name
                )

        def ways(turn: Turn, here: Mapping = here) -> Iterator[str]:
            yield f"roles.{turn.role}.micro_batch_tokens below {here[turn.role].micro_batch_tokens}"
            yield from (f"roles.{name}.offload=all" for name in here if name != turn.role and turn.uses[name])
            yield "more tp or pp, or more devices in the pool"

        problems += turn_problems(pool, own, [*layouts.values()], turns, ways)
        waits[pool] = [
            {name: away(held, here[name].offload) for name, held in memory(rank).items()} for rank in range(len(own))
        ]
    problems += node_problems(devices, waits, _less_waiting)
    if problems:
        raise DeviceTooSmall(problems)


def _less_waiting(uses: Mapping[str, int]) -> Iterator[str]:
    """Ways out where too much of roles that score waits on a node."""
    yield from (f"roles.{name}.offload=none" for name, size in uses.items() if size)
    yield "more tp or pp, which leave fewer copies of the weights"
    yield "nodes with more memory"


def check_training_fit(config: SupervisedConfig, name: str, devices: Sequence[Device]) -> None:
    """Compare what a model that trains needs with what is there.

    Args:
        name: "actor", or "reward" for a reward model on pairs.
        devices: of its pool, in the order of its ranks.

    Raises:
        DeviceTooSmall: naming the parts and the ways out, for the pool and for the node that lacks most.
    """
    role = config.role
    layout = layout_on(role, config.pools)
    sides = 2 if name == "reward" else 1
    common = _common([layout], trained=True)
    tokens = -(-config.data.batch // layout.dp) * sides * config.data.max_tokens

    def memory(rank: int, tokens: int | None = tokens) -> RoleMemory:
        return _memory(config, role, config.model_folder, layout, rank, scalar_head=name == "reward", tokens=tokens)

    def turns(rank: int, total: int) -> Iterator[Turn]:
        held = memory(rank)
        update = {part: size for part, size in parts(held) if part != "scoring"}
        yield Turn(f"updating the {name}", {**common, name: update}, name)
        if config.data.validation:  # whose micro-batches are full, however few tokens an update has
            rests = {"weights": held.weights, **held.resting(role.offload)}
            uses = {**rests, "scoring": memory(rank, tokens=None).scoring}
            yield Turn(f"validating the {name}", {**common, name: uses}, name)

    def ways(turn: Turn) -> Iterator[str]:
        if "activations" in turn.uses[name] and role.recompute != "full":
            yield f"role.recompute={'selective or full' if role.recompute == 'none' else 'full'}"
        least = sides * config.data.max_tokens
        if role.micro_batch_tokens > least:
            yield f"role.micro_batch_tokens below {role.micro_batch_tokens} (at least {least})"
        yield "more tp or pp, or more devices in the pool"

    def less_waiting(uses: Mapping[str, int]) -> Iterator[str]:
        if uses.get(name):
            yield "role.offload=none"  # nobody else needs the room
        yield "more devices in the pool, on more nodes"
        yield "nodes with more memory"

    held = [memory(rank) for rank in range(len(devices))]
    waits = [{name: away(own, role.offload), SAVED: saved(own)} for own in held]
    problems = [*turn_problems(role.pool, devices, [layout], turns, ways)]
    problems += node_problems({role.pool: devices}, {role.pool: waits}, less_waiting)
    if problems:
        raise DeviceTooSmall(problems)


def _memory(
    config: Devices,
    role: MegatronRoleConfig,
    folder: str,
    layout: Layout,
    rank: int,
    *,
    scalar_head: bool,
    tokens: int | None = None,
) -> RoleMemory:
    """What a role takes on the device of one rank.

    Args:
        folder: of its model.
        tokens: that each data-parallel rank has of an update; None: it only scores.
    """
    spec = read_model_spec(folder)
    trains = tokens is not None
    budget = role.micro_batch_tokens if tokens is None else tokens
    use = RoleUse(
        vocabulary=megatron_vocabulary(spec.vocab_size, role.tp),
        item_bytes=item_bytes(config),
        trained=trains,
        scalar_head=scalar_head,
        tokens=min(budget, role.micro_batch_tokens),
        micro_batches=layout.micro_batches(-(-budget // role.micro_batch_tokens)),
        recompute=role.recompute,
        chunk_bytes=CHUNK_BYTES,
        adapters=with_lora(spec, role.lora).layer_adapters(role.tp) if trains else 0,
    )
    return role_memory(spec, layout, layout.coordinates(rank)["pp"], use)
