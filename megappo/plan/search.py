"""All layouts and placements of a configuration's roles on so many devices, ranked by the estimated step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Any

from megappo.config import Config, PoolConfig
from megappo.layout.devices import DeviceProfile
from megappo.layout.placement import place_pools
from megappo.layout.timeline import step_seconds
from megappo.plan.estimate import Estimate, Workload, estimate
from megappo.plan.memory import fit_problems
from megappo.plan.pool_search import PoolSearch
from megappo.plan.sync import rough_sync

PARTS = 16
"""Pools have sizes of about one part in so many of all devices."""
POOL_NAMES = {"actor": "train", "critic": "value", "reference": "score", "reward": "reward", "rollout": "serve"}
"""A pool is named after the first of its roles."""

Split = tuple[tuple[tuple[str, ...], int], ...]
"""Who shares a pool, and its devices; for each pool."""


class SearchError(ValueError):
    """Nothing can be found, with the reason in words."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True)
class Found:
    """A layout of everything, as a configuration."""

    config: Config
    estimate: Estimate


@dataclass(frozen=True)
class Ranking:
    """What a search found.

    Attributes:
        best: the best of each way to share pools, the quickest first.
        placements, layouts: how many were looked at.
    """

    best: tuple[Found, ...]
    placements: int
    layouts: int


def search(config: Config, device: DeviceProfile, work: Workload, devices: int, per_node: int) -> Ranking:
    """Find the quickest layouts that fit.

    Args:
        devices: to use, all of them.
        per_node: devices of a node.

    Raises:
        SearchError: the devices do not fill nodes, or cannot be dealt out, or nothing fits; it says what is closest.
    """
    if config.ppo.staleness and devices < 2:
        raise SearchError(
            f"ppo.staleness: {config.ppo.staleness} needs engines in a pool of their own: give --devices of at least "
            "2, or ppo.staleness=0"
        )
    if devices > per_node and devices % per_node:
        low = devices - devices % per_node
        raise SearchError(f"--devices {devices}: does not fill nodes of {per_node}: give {low} or {low + per_node}")
    pools = PoolSearch(config, device, work, per_node)
    names = (*config.roles.megatron, "rollout")
    placements = 0
    ranked: list[tuple[float, tuple[tuple[str, ...], ...], Split]] = []
    overlapped = config.ppo.staleness > 0
    for groups in partitions(names):
        if overlapped and ("rollout",) not in groups:  # engines that generate meanwhile have devices of their own
            continue
        options: list[tuple[float, tuple[tuple[str, ...], ...], Split]] = []
        for sizes in splits(devices, len(groups), per_node):
            placements += 1
            shares = [pools.best(group, size) for group, size in zip(groups, sizes, strict=True)]
            fitting = [share for share in shares if share is not None]
            if len(fitting) == len(groups):
                seconds = step_seconds((share.phases for share in fitting), overlapped=overlapped)
                options.append((seconds, groups, tuple(zip(groups, sizes, strict=True))))
        ranked += sorted(options)[:3]
    best: dict[tuple[tuple[str, ...], ...], Found] = {}
    for _, groups, split in sorted(ranked):
        if groups not in best:
            found = as_config(config, pools, split)
            if not fit_problems(found, device):
                best[groups] = Found(found, estimate(found, device, work, rough_sync(found, device)))
    if not best:
        raise SearchError(*_closest(pools, devices))
    order = sorted(best.values(), key=lambda found: (found.estimate.seconds, len(found.config.pools)))
    return Ranking(tuple(order), placements, pools.tried)


def partitions(names: Sequence[str]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Every way to put names into groups, in their order."""
    if not names:
        yield ()
        return
    first, rest = names[0], names[1:]
    for size in range(len(rest), -1, -1):
        for others in combinations(rest, size):
            left = [name for name in rest if name not in others]
            yield from (((first, *others), *groups) for groups in partitions(left))


def splits(devices: int, pools: int, per_node: int) -> Iterator[tuple[int, ...]]:
    """Every way to deal devices out to pools: parts of a node, or whole nodes; in steps of about a sixteenth."""
    step = max(devices // PARTS, 1)
    unit = step - step % per_node if step >= per_node else max(d for d in range(1, step + 1) if per_node % d == 0)
    parts = devices // unit
    for cuts in combinations(range(1, parts), pools - 1):
        edges = (0, *cuts, parts)
        sizes = [(high - low) * unit for low, high in pairwise(edges)]
        sizes[-1] += devices - parts * unit
        if _fit_nodes(sizes, devices, per_node):
            yield tuple(sizes)


def _fit_nodes(sizes: Sequence[int], devices: int, per_node: int) -> bool:
    if any(size > per_node and size % per_node for size in sizes):
        return False
    pools = {
        str(at): PoolConfig(nodes=-(-size // per_node), devices_per_node=min(size, per_node))
        for at, size in enumerate(sizes)
    }
    return len(place_pools(pools, per_node)) <= -(-devices // per_node)


def as_config(config: Config, search: PoolSearch, split: Split) -> Config:
    """The configuration with these pools and what is best in each."""
    pools: dict[str, PoolConfig] = {}
    sections: dict[str, Any] = {}
    for names, devices in split:
        share = search.best(names, devices)
        assert share is not None
        pool = "all" if len(split) == 1 else POOL_NAMES[names[0]]
        pools[pool] = search.pool(devices)
        for name, role in share.roles.items():
            placed = replace(role, pool=pool)
            sections[name] = config.roles.reward.laid_out(placed) if name == "reward" else placed
        if share.rollout is not None:
            sections["rollout"] = replace(share.rollout, pool=pool)
    return replace(config, pools=pools, roles=replace(config.roles, **sections))


def _closest(pools: PoolSearch, devices: int) -> Iterator[str]:
    """What keeps every placement from fitting: the lack that is smallest where all devices are shared, and alone."""
    names = (*pools.config.roles.megatron, "rollout")
    yield f"no layout fits on {devices} x {pools.device.name}"
    for group in (names, *((name,) for name in names)):
        fits = pools.best(group, devices) is not None
        lack = pools.lacks.get((group, devices))
        if lack and not fits:
            yield f"{'closest' if group == names else 'even alone'}: {lack.text}"
    yield (
        "ways out: more devices, a device with more memory, lower data.max_response or roles.*.micro_batch_tokens, "
        "or a smaller model"
    )
