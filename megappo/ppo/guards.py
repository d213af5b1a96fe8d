"""Guard rails: limits on a step's metrics, and what follows when they are passed. A pure function of a small state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from megappo.config import GuardConfig
from megappo.metric_names import VALIDATION, family, meant


class UnknownMetric(ValueError):
    """A metric that a guard watches is not among those that are logged."""


@dataclass(frozen=True)
class GuardState:
    """What the guards remember; a checkpoint holds it.

    Attributes:
        beyond: by guard, steps in a row beyond its limit since it last acted; only of guards whose metric was seen.
        rate_factor: what all learning rates are multiplied by.
        kl_factor: what the KL coefficients are multiplied by.
    """

    beyond: Mapping[str, int] = field(default_factory=dict)
    rate_factor: float = 1.0
    kl_factor: float = 1.0

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able values; floats survive JSON exactly."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any], guards: Mapping[str, GuardConfig]) -> GuardState:
        """The inverse of :meth:`to_dict`; what no guard that is still configured can have done is forgotten."""
        actions = {guard.action for guard in guards.values()}
        return cls(
            beyond={name: count for name, count in state["beyond"].items() if name in guards},
            rate_factor=state["rate_factor"] if "lower_lr" in actions else 1.0,
            kl_factor=state["kl_factor"] if "raise_kl" in actions else 1.0,
        )


@dataclass(frozen=True)
class Judgement:
    """What :func:`judge` finds.

    Attributes:
        state: from now on.
        messages: one of each guard that acts.
        stop: those of them that end the run.
    """

    state: GuardState
    messages: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()


def judge(guards: Mapping[str, GuardConfig], metrics: Mapping[str, float], state: GuardState) -> Judgement:
    """Compare a step's metrics with the limits.

    A guard acts once its metric was beyond a limit (or no number) in `for_steps` steps in a row, and then counts from
    0 again. A step that does not log the metric, as those without validation, changes nothing.

    Args:
        guards: by name.
        metrics: of the step, by name.
        state: after the step before.

    Raises:
        UnknownMetric: the step logs others of a metric's family, but not it, and no step before did.
    """
    messages, stop = [], []
    for name, guard in guards.items():
        value = metrics.get(guard.metric)
        if value is None:
            if name not in state.beyond:
                _refuse_unknown(f"ppo.guards.{name}.metric", guard.metric, metrics)
            continue
        count = state.beyond.get(name, 0) + 1 if is_beyond(guard, value) else 0
        acts = count == guard.for_steps
        state = replace(state, beyond={**state.beyond, name: 0 if acts else count})
        if not acts:
            continue
        if guard.action == "lower_lr":
            state = replace(state, rate_factor=state.rate_factor * guard.factor)
        if guard.action == "raise_kl":
            state = replace(state, kl_factor=state.kl_factor / guard.factor)
        messages.append(_message(name, guard, value, state))
        if guard.action == "stop":
            stop.append(messages[-1])
    return Judgement(state, tuple(messages), tuple(stop))


def is_beyond(guard: GuardConfig, value: float) -> bool:
    """Whether a value is not within the limits; what is no number never is."""
    above, below = guard.above, guard.below
    return not ((above is None or value <= above) and (below is None or value >= below))


def guard_metrics(state: GuardState) -> dict[str, float]:
    """``guard/<name>``, steps in a row beyond its limit, and the factors that guards have set."""
    counts = {f"guard/{name}": float(count) for name, count in state.beyond.items()}
    return {**counts, "guard/rate_factor": state.rate_factor, "guard/kl_factor": state.kl_factor}


def _refuse_unknown(key: str, metric: str, metrics: Mapping[str, float]) -> None:
    """Families whose names are known from the first step, or validation, that logs any of them."""
    logged = [name for name in metrics if family(name) == family(metric)]
    if logged and family(metric) in (*VALIDATION, "reward"):
        raise UnknownMetric(f"{key}: {metric} is not logged{meant(metric, logged)}")


def _message(name: str, guard: GuardConfig, value: float, state: GuardState) -> str:
    limit = f"not above {guard.above:g}" if guard.above is not None else ""
    if guard.below is not None:
        limit = f"{limit} and not below {guard.below:g}" if limit else f"not below {guard.below:g}"
    steps = "" if guard.for_steps == 1 else f" for {guard.for_steps} steps"
    done = {
        "warn": "",
        "lower_lr": f"; learning rates are now {state.rate_factor:g} of what is configured",
        "raise_kl": f"; KL coefficients are now {state.kl_factor:g} times what they would be",
        "stop": "; the run ends",
    }
    return f"ppo.guards.{name}: {guard.metric} is {value:g}, and should be {limit}{steps}{done[guard.action]}"
