"""The weight sync of a configuration: the real plan between assumed places, and how long it should take."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from megappo.config import Config, Devices
from megappo.fit.devices import item_bytes, role_layout, rollout_memory
from megappo.layout.devices import DeviceProfile
from megappo.layout.memory import GIB
from megappo.layout.placement import place_pools
from megappo.layout.timeline import Phase
from megappo.models.spec import read_model_spec, with_lora
from megappo.reshard.actor_to_rollout import TransferSpec
from megappo.reshard.explain import LINKS, Explanation, Speeds, explain
from megappo.reshard.plan import plan_copies
from megappo.reshard.routes import Places

OVERHEAD, FIXED = 1.25, 1.7e-3
"""Times the bytes over the busiest link's rate, plus seconds, with a sample verified (seen on one H200 / predicted:
0.5B 2.2 / 2.3 ms, 1.5B 3.6 / 3.6 ms, 7B 10.6 / 10.7 ms). Between nodes it was not compared with a measurement."""


def weight_sync(config: Config, device: DeviceProfile) -> tuple[Explanation, Phase]:
    """Plan the transfer for every rank, and explain it."""
    transfer = planned_transfer(config, device)
    sides = transfer.sources(), transfer.destinations()
    speeds = Speeds(device.bandwidth / 2, device.node_gb_s * 1e9, device.network_gb_s * 1e9)
    copies = plan_copies(*sides, transfer.places, forward=transfer.forward)
    told = explain(copies, *sides, transfer.places, item_size=item_bytes(config), speeds=speeds)
    farthest = max((link for link, size in told.planned.items() if size), default=0)
    copies_s = OVERHEAD * sum(told.seconds) + FIXED
    return told, Phase({f"copies {LINKS[farthest]}": copies_s, **_merging(config, device)})


def _merging(config: Config, device: DeviceProfile) -> dict[str, float]:
    """What follows adapters: every engine's base weights come from host memory, to be merged."""
    if config.roles.actor.lora is None:
        return {}
    return {"merging from host memory": rollout_memory(config).weights / (device.host_gb_s * 1e9)}


def planned_transfer(config: Config, device: DeviceProfile) -> TransferSpec:
    """The transfer as a run makes it, were its pools placed as :func:`places` says."""
    actor, rollout = config.roles.actor, config.roles.rollout
    where = places(config, device.devices_per_node)
    engines = config.pools[rollout.pool].devices // rollout.tp
    return TransferSpec(
        model=with_lora(read_model_spec(config.model_folder("actor")), actor.lora),
        actor=role_layout(config, "actor"),
        engines=engines,
        engine_tp=rollout.tp,
        fused_norms=True,
        places=(*where[actor.pool], *where[rollout.pool][: engines * rollout.tp]),
        forward=True,
    )


def places(config: Devices, devices_per_node: int) -> dict[str, Places]:
    """(machine, device) of each rank of each pool, on machines with so many devices, or as many as the widest pool."""
    width = max(devices_per_node, *(pool.devices_per_node for pool in config.pools.values()))
    out: dict[str, list[tuple[str, str]]] = {name: [] for name in config.pools}
    for node, names in enumerate(place_pools(config.pools, width)):
        devices = iter(range(width))
        for name in names:
            out[name] += [(f"node {node}", str(next(devices))) for _ in range(config.pools[name].devices_per_node)]
    return dict(out)


def rough_sync(config: Config, device: DeviceProfile) -> Phase:
    """Close to :func:`weight_sync`, without a plan: whole weights into every node, or a rank's part on its device."""
    spec, rollout, actor = read_model_spec(config.model_folder("actor")), config.roles.rollout, config.roles.actor
    adapters = with_lora(spec, actor.lora).num_parameters() - spec.num_parameters()
    size = (adapters or spec.num_parameters()) * item_bytes(config)
    merging = _merging(config, device)
    pool, source = config.pools[rollout.pool], config.pools[actor.pool]
    part = size / rollout.tp
    if rollout.pool == actor.pool:
        same = role_layout(config, "actor").tp == rollout.tp and actor.pp == 1
        return Phase(
            {"copies": OVERHEAD * part / (device.bandwidth / 2 if same else device.link(False)) + FIXED, **merging}
        )
    network = pool.devices + source.devices > device.devices_per_node
    link = device.link(network)
    into_nodes = size * ceil(pool.devices / device.devices_per_node) if network else part * pool.devices
    received = into_nodes / pool.devices
    forwarded = part / device.link(False) if network and rollout.tp < pool.devices_per_node else 0.0
    return Phase(
        {"copies": OVERHEAD * (max(received, into_nodes / source.devices) / link + forwarded) + FIXED, **merging}
    )


def sync_lines(told: Explanation) -> Iterator[str]:
    """A table for people: bytes by link, planned and the least there can be."""
    yield f"{'link':14}  {'planned GiB':>11}  {'least GiB':>11}"
    for link, name in LINKS.items():
        if told.planned[link] or told.least[link]:
            yield f"{name:14}  {told.planned[link] / GIB:11.2f}  {told.least[link] / GIB:11.2f}"
    if any(told.received.values()):
        rank = max(told.received, key=told.received.__getitem__)
        least = told.least_received.get(rank, 0)
        yield (f"each engine device receives at most {told.received[rank] / GIB:.2f} GiB; it lacks {least / GIB:.2f}")
    else:
        yield "nothing leaves a device"
