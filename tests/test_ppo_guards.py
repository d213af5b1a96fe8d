"""Guards: a function of metrics and a small state, stepped through by hand."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from megappo.checkpoints import Best
from megappo.config import GuardConfig
from megappo.ppo.guards import GuardState, UnknownMetric, judge


def guards(**fields: Any) -> dict[str, GuardConfig]:
    return {"kl": GuardConfig(metric="actor/ppo_kl", **fields)}


def run(limits: dict[str, GuardConfig], values: list[float | None]) -> tuple[list[int], GuardState]:
    """Steps that acted, and the state in the end; through JSON between steps, as a killed run's would go."""
    state, acted = GuardState(), []
    for step, value in enumerate(values):
        found = judge(limits, {} if value is None else {"actor/ppo_kl": value}, state)
        acted += [step] * bool(found.messages)
        state = GuardState.from_dict(json.loads(json.dumps(found.state.to_dict())), limits)
    return acted, state


@pytest.mark.parametrize(
    ("fields", "values", "acted"),
    [
        ({"above": 0.1}, [0.1, 0.2, 0.05, 0.3], [1, 3]),  # the limit itself is all right
        ({"below": 1.0}, [1.0, 0.9], [1]),
        ({"below": 0.0, "above": 1.0}, [0.5, 1.5, -0.5], [1, 2]),
        ({"above": 0.1, "for_steps": 3}, [1, 1, 0, 1, 1, 1, 1, 1, 1], [5, 8]),  # in a row, and then again
        ({"above": 0.1, "for_steps": 2}, [1, None, 1], [2]),  # a step without the metric neither counts nor clears
        ({"above": 0.1}, [math.nan], [0]),
    ],
)
def test_when_a_guard_acts(fields: dict[str, Any], values: list[float | None], acted: list[int]) -> None:
    assert run(guards(**fields), values)[0] == acted


def test_what_it_does() -> None:
    assert run(guards(above=0.1, action="lower_lr", factor=0.5), [1, 0, 1])[1].rate_factor == 0.25
    assert run(guards(above=0.1, action="raise_kl", factor=0.8), [1, 1])[1].kl_factor == pytest.approx(1 / 0.64)
    unchanged = run(guards(above=0.1), [1, 1])[1]
    assert (unchanged.rate_factor, unchanged.kl_factor) == (1.0, 1.0)
    found = judge(guards(above=0.1, for_steps=1, action="stop"), {"actor/ppo_kl": 0.25}, GuardState())
    assert found.stop == ("ppo.guards.kl: actor/ppo_kl is 0.25, and should be not above 0.1; the run ends",)


def test_what_is_not_configured_any_more_is_forgotten() -> None:
    _, state = run(guards(above=0.1, action="lower_lr", for_steps=2), [1, 1, 1])
    assert (state.rate_factor, state.beyond) == (0.5, {"kl": 1})
    assert GuardState.from_dict(state.to_dict(), {}) == GuardState()


def test_a_metric_that_never_comes_is_refused_once_others_of_its_kind_do() -> None:
    limits = {"canary": GuardConfig(metric="canary/math/acc/mean@1", below=0.5)}
    judge(limits, {"actor/ppo_kl": 1.0}, GuardState())  # no validation yet
    logged = {"canary/maths/acc/mean@1": 0.4, "val-core/math/acc/mean@1": 1.0}
    with pytest.raises(UnknownMetric) as refused:
        judge(limits, logged, GuardState())
    assert str(refused.value) == (
        "ppo.guards.canary.metric: canary/math/acc/mean@1 is not logged: did you mean canary/maths/acc/mean@1?"
    )
    seen = judge(limits, {"canary/math/acc/mean@1": 0.6}, GuardState()).state
    judge(limits, logged, seen)  # it came once: a source may be missing from some step


@pytest.mark.parametrize(
    ("mode", "values", "best"),
    [("max", [0.2, 0.5, 0.5, 0.4], 1), ("min", [3.0, 2.0, 2.5], 1), ("max", [math.nan, 0.1, math.nan], 1)],
)
def test_the_best_step_is_the_first_of_equals(mode: str, values: list[float], best: int) -> None:
    found: Best | None = None
    for step, value in enumerate(values):
        found = Best(step, value).better_of(found, mode)
    assert found == Best(best, values[best])
