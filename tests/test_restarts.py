"""How often a run starts over, and who takes over the prompts of an engine that died."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megappo.cluster.calls import Call, Pending, Place, WorkerFailed, WorkerLost
from megappo.cluster.groups import Generation, Member, RolloutGroup
from megappo.cluster.serving import Flight, Serving
from megappo.restarts import with_restarts


@dataclass
class Attempts:
    """A run whose attempts end one after the other: at a step with a checkpoint of its own, or with an error."""

    ends: list[int | Exception]
    last_checkpoint: Path | None = None
    warnings: list[str] = field(default_factory=list)

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def __call__(self) -> str:
        end = self.ends.pop(0)
        if isinstance(end, Exception):
            raise end
        self.last_checkpoint = Path(f"step_{end}")
        if self.ends:
            raise WorkerLost(f"died after step {end}")
        return "done"


def test_a_new_checkpoint_begins_the_count_anew() -> None:
    attempts = Attempts([WorkerLost("lost"), 1, WorkerLost("again"), 2, 3])
    assert with_restarts(attempts, attempts, 2) == "done"
    assert [text.splitlines()[1] for text in attempts.warnings] == [
        "starting over from the beginning (restart 1 of run.restarts = 2)",
        "starting over from the checkpoint step_1 (restart 1 of run.restarts = 2)",
        "starting over from the checkpoint step_1 (restart 2 of run.restarts = 2)",
        "starting over from the checkpoint step_2 (restart 1 of run.restarts = 2)",
    ]


def test_it_does_not_start_over_forever_without_progress() -> None:
    attempts = Attempts([1, *(WorkerLost(f"loss {number}") for number in range(9))])
    with pytest.raises(WorkerLost, match="loss 2"):
        with_restarts(attempts, attempts, 3)
    assert len(attempts.warnings) == 3


def test_other_errors_would_come_again() -> None:
    attempts = Attempts([WorkerFailed("the reward raises"), 1])
    with pytest.raises(WorkerFailed, match="the reward raises"):
        with_restarts(attempts, attempts, 3)
    assert attempts.warnings == []


# --- engines ---------------------------------------------------------------------------------------------------------


@dataclass
class Engine:
    """Stands for an engine's actor: remembers what it was asked."""

    asked: list[Any] = field(default_factory=list)

    def __getattr__(self, method: str) -> Any:
        @dataclass
        class Method:
            asked: list[Any]

            def remote(self, *args: Any) -> Any:
                self.asked.append((method, args))
                ref = f"{method} {args}"
                return (f"rows of {ref}", ref) if method == "generate" else ref

        return Method(self.asked)


@dataclass
class Watched:
    """Stands for :class:`Calls`: every call succeeds, but for the losses that are to come."""

    losses: list[WorkerLost]

    def start(self, place: Place, method: str, ref: Any) -> Call:
        return Call(place, method, ref)

    def forget(self, calls: Any) -> None:
        list(calls)

    def gather(self, *pending: Pending[Any]) -> list[Any]:
        if self.losses and pending[0].calls[0].method == "generate":
            raise self.losses.pop(0)
        return [one.combine([(call.place.rank, call.ref) for call in one.calls]) for one in pending]


@dataclass
class Starter:
    calls: Watched
    started: list[Engine] = field(default_factory=list)

    def engine(self, index: int) -> Member:
        self.started.append(Engine())
        return Member(self.started[-1], Place("rollout", index, "serve", "?", "log"))

    def located(self, *started: list[Member]) -> list[tuple[Member, ...]]:
        return [tuple(members) for members in started]


@dataclass
class Weights:
    rollout: RolloutGroup
    events: list[str] = field(default_factory=list)

    def reconnect(self, rollout: RolloutGroup) -> None:
        self.rollout = rollout
        self.events.append("reconnect")

    def sync(self, version: int) -> int:
        self.events.append(f"sync {version}")
        return 1


def died(*ranks: int, role: str = "rollout") -> WorkerLost:
    return WorkerLost("died", frozenset(Place(role, rank, "serve", "node", "log") for rank in ranks))


@dataclass
class Scene:
    serving: Serving
    weights: Weights
    starter: Starter
    engines: list[Engine]

    def begin(self, ahead: bool = False) -> Flight:
        def combine(rows: Any, told: Any) -> Any:
            assert list(rows) == [f"rows of {ref}" for _, ref in told]
            return told

        shares = tuple((share,) for share in ("a", "b", "c"))
        return self.serving.begin(lambda group: Generation(shares, combine), version=4, ahead=ahead)

    def generate(self) -> Any:
        return self.serving.finish(self.begin())


def scene(monkeypatch: pytest.MonkeyPatch, *losses: WorkerLost, replacements: int = 2) -> Scene:
    monkeypatch.setattr("ray.kill", lambda actor: None)
    calls, engines = Watched(list(losses)), [Engine(), Engine(), Engine()]
    members = tuple(Member(e, Place("rollout", rank, "serve", "node", "log")) for rank, e in enumerate(engines))
    weights, starter = Weights(RolloutGroup(members, calls)), Starter(calls)  # type: ignore[arg-type]
    serving = Serving(starter, "settings", weights, replacements=replacements, status=lambda text: None)  # type: ignore[arg-type]
    return Scene(serving, weights, starter, engines)


def test_the_living_take_over_what_the_dead_were_asked_and_successors_serve_after_a_sync(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at = scene(monkeypatch, died(1), died(2))
    assert at.generate() == [(0, "generate ('a',)"), (0, "generate ('b',)"), (0, "generate ('c',)")]
    assert [engine.asked for engine in at.starter.started] == [[("build", ("settings",))]] * 2
    assert at.weights.events == []  # nothing has stopped for them
    assert at.serving.sync_weights(5) == 1
    assert at.weights.events == ["reconnect", "sync 5"]
    asked = [[method for method, _ in engine.asked] for engine in at.engines]
    assert asked[0][-1] == "whereabouts" and "whereabouts" not in asked[1] + asked[2]  # the dead do not answer
    at.generate()
    assert at.starter.started[0].asked[-1] == ("generate", ("b",))
    assert at.starter.started[1].asked[-1] == ("generate", ("c",))


def test_nobody_waits_for_a_successor_while_others_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they draw on, or begin what comes next with the same weights: a further round, or a validation."""
    at = scene(monkeypatch, died(1), replacements=3)
    taken_over = [(0, "generate ('a',)"), (0, "generate ('b',)"), (2, "generate ('c',)")]
    assert at.generate() == taken_over and at.generate() == taken_over
    assert [member.place.rank for member in at.serving.members(4)] == [0, 2]
    assert at.weights.events == []
    at.serving.survive(died(0, 2))
    assert [member.place.rank for member in at.serving.members(4)] == [0, 1, 2]
    assert at.weights.events == ["reconnect", "sync 4"]


def test_a_successor_that_dies_as_it_starts_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    at = scene(monkeypatch, died(1), replacements=3)
    at.generate()
    with pytest.raises(WorkerLost):
        at.serving.survive(died(1))


def test_without_any_left_the_successors_get_the_weights_first(monkeypatch: pytest.MonkeyPatch) -> None:
    at = scene(monkeypatch, died(0, 1, 2), replacements=3)
    assert at.generate() == [(0, "generate ('a',)"), (1, "generate ('b',)"), (2, "generate ('c',)")]
    assert at.weights.events == ["reconnect", "sync 4"]


def test_a_death_that_is_noticed_while_others_train(monkeypatch: pytest.MonkeyPatch) -> None:
    at = scene(monkeypatch)
    flight = at.begin(ahead=True)
    at.serving.survive(died(2))
    assert at.serving.finish(flight) == [(0, "generate ('a',)"), (1, "generate ('b',)"), (0, "generate ('c',)")]
    assert at.weights.events == []
    at = scene(monkeypatch, replacements=3)
    at.begin(ahead=True)
    with pytest.raises(WorkerLost):  # the actor has other weights by now, and none is left to go on with the old
        at.serving.survive(died(0, 1, 2))
    assert at.weights.events == []
    at = scene(monkeypatch, replacements=3)
    at.begin()
    at.serving.survive(died(0, 1, 2))
    assert at.weights.events == ["reconnect", "sync 4"]


def test_what_is_generated_ahead_is_never_asked_of_an_engine_that_got_later_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second round is begun when the actor has trained: a successor would get what that made of the weights."""
    at = scene(monkeypatch)
    first = at.begin(ahead=True)
    at.serving.survive(died(1))
    at.serving.finish(first)
    assert at.serving.finish(at.begin(ahead=True)) == [
        (0, "generate ('a',)"),
        (0, "generate ('b',)"),
        (2, "generate ('c',)"),
    ]
    assert at.weights.events == []
    at.serving.sync_weights(5)
    assert at.generate() == [(0, "generate ('a',)"), (1, "generate ('b',)"), (2, "generate ('c',)")]
    assert at.weights.events == ["reconnect", "sync 5"]


@pytest.mark.parametrize("loss", [died(0, 1, 2), died(0, role="actor"), WorkerLost("no answer")])
def test_too_many_or_others_end_it(monkeypatch: pytest.MonkeyPatch, loss: WorkerLost) -> None:
    at = scene(monkeypatch, loss)
    with pytest.raises(WorkerLost):
        at.generate()
    assert at.starter.started == []
