"""One step as phases on pools: what runs at the same time, what waits, and for whom. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

GENERATE, SLEEP, ADVANTAGES, WAKE, SYNC = "gen", "sleep", "adv", "wake", "update_weights"
DRIVER = "driver"

STEP: Sequence[Sequence[str]] = (
    (GENERATE,),
    (SLEEP,),
    ("old_log_prob", "values", "ref", "reward_model"),
    (ADVANTAGES,),
    ("update_critic", "update_actor"),
    (WAKE,),
    (SYNC,),
)
"""The phases of a step, named as in a run's ``timing_s``. Those of a line start together, each in its role's pool,
where they take turns in this order; the next line starts when all of them have ended."""

ROLES: Mapping[str, tuple[str, ...]] = {
    GENERATE: ("rollout",),
    SLEEP: ("rollout",),
    "old_log_prob": ("actor",),
    "values": ("critic",),
    "ref": ("reference",),
    "reward_model": ("reward",),
    ADVANTAGES: (DRIVER,),
    "update_critic": ("critic",),
    "update_actor": ("actor",),
    WAKE: ("rollout",),
    SYNC: ("actor", "rollout"),
}
"""Whose devices are busy in a phase."""


@dataclass(frozen=True)
class Phase:
    """How long something takes, and what for.

    Attributes:
        parts: seconds by what is waited for; they add up.
    """

    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """In all."""
        return sum(self.parts.values())

    @property
    def binds(self) -> str:
        """What most of the time goes to."""
        return max(self.parts, key=self.parts.__getitem__, default="nothing")

    def times(self, factor: float) -> Phase:
        """The same, several times over."""
        return Phase({name: seconds * factor for name, seconds in self.parts.items()})


def total(phases: Iterable[Phase]) -> Phase:
    """One after the other, as one."""
    parts: dict[str, float] = {}
    for phase in phases:
        for name, seconds in phase.parts.items():
            parts[name] = parts.get(name, 0.0) + seconds
    return Phase(parts)


@dataclass(frozen=True)
class Busy:
    """A pool at work on a phase, in seconds from the step's begin."""

    pool: str
    phase: str
    began: float
    ended: float


def timeline(phases: Mapping[str, Phase], pools: Mapping[str, str], *, overlapped: bool = False) -> list[Busy]:
    """Lay a step's phases out in time.

    Args:
        phases: by name; those that are missing take no time.
        pools: of each role.
        overlapped: a later step's batch is generated meanwhile: all but the weight sync begins without waiting for it.
    """
    out: list[Busy] = []
    now = generated = 0.0
    for group in STEP:
        if SYNC in group:
            now = max(now, generated)
        free: dict[str, float] = {}
        for name in group:
            if name not in phases or not phases[name].seconds:
                continue
            taken = list(dict.fromkeys(pools.get(role, role) for role in ROLES[name]))
            began = max(free.get(pool, now) for pool in taken)
            for pool in taken:
                free[pool] = began + phases[name].seconds
                out.append(Busy(pool, name, began, free[pool]))
        ended = max(free.values(), default=now)
        if overlapped and GENERATE in group:
            generated = ended
        else:
            now = ended
    return out


def step_seconds(pools: Iterable[Mapping[str, float]], *, overlapped: bool = False) -> float:
    """Seconds of a step as :func:`timeline` lays it out, from those of the phases in each pool, by name."""
    taken = list(pools)
    lines = {line: max(sum(pool.get(name, 0.0) for name in line) for pool in taken) for line in map(tuple, STEP)}
    if not overlapped:
        return sum(lines.values())
    generating, sync = lines.pop((GENERATE,)), lines.pop((SYNC,))
    return max(generating, sum(lines.values())) + sync


def busy_share(busy: Sequence[Busy], pool: str) -> float:
    """Part of the step in which a pool works."""
    end = max((one.ended for one in busy), default=0.0)
    return sum(one.ended - one.began for one in busy if one.pool == pool) / end if end else 0.0
