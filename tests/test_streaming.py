"""Turns of engines that draw while others work, played by functions: what is asked, and what a death costs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from megappo.cluster import dataflow
from megappo.cluster.calls import Call, Pending, Place, WorkerLost
from megappo.cluster.groups import Member
from megappo.cluster.streaming import Streaming
from megappo.data.progress import SCHEMA, begun
from megappo.workers.settings import Sampling

ROWS = begun(
    pa.table({"id": pa.array(range(8)), "prompt_index": np.repeat(range(4), 2), "prompt_ids": pa.array([[1]] * 8)})
)


@dataclass
class Engine:
    """Answers at once: responses that are waited for are done, of the others a token is there."""

    rank: int
    ids: list[int] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def rows(self, ids: list[int], reason: str | None) -> pa.Table:
        count = len(ids)
        return pa.table([ids, [[5]] * count, [[-1.0]] * count, [[3]] * count, [reason] * count], schema=SCHEMA)

    def __getattr__(self, method: str) -> Any:
        engine = self

        class Method:
            beside = False

            def options(self, concurrency_group: str) -> Any:
                assert concurrency_group == "control"
                self.beside = True
                return self

            def remote(self, turn: int, *args: Any) -> Any:
                engine.asked.append(f"{method} {turn}")
                assert self.beside == (method != "stream")
                if method == "stream":
                    engine.ids = args[0].ids.tolist()
                    return lambda: engine.rows(engine.ids, None)
                if method == "wait":
                    engine.ids = [row for row in engine.ids if row not in args[0]]
                    return lambda: engine.rows(args[0], "stop")
                return lambda: None

        return Method()


@dataclass
class Scene:
    """Calls and serving in one: the calls of dead engines fail until they are forgotten."""

    engines: list[Engine]
    dead: set[int] = field(default_factory=set)
    told: list[Callable[[Collection[int]], None]] = field(default_factory=list)
    limited: list[str] = field(default_factory=list)

    def members(self, version: int) -> list[Member]:
        living = [engine for engine in self.engines if engine.rank not in self.dead]
        return [Member(engine, Place("rollout", engine.rank, "serve", "node", "log")) for engine in living]

    def on_loss(self, told: Callable[[Collection[int]], None]) -> None:
        self.told.append(told)

    def survive(self, loss: WorkerLost) -> None:
        for told in self.told:
            told({place.rank for place in loss.died})

    def start(self, place: Place, method: str, ref: Any, *, limited: bool = True) -> Call:
        assert limited == (method != "stream")  # a turn lasts as long as the others train
        return Call(place, method, ref)

    def limit(self, call: Call) -> None:
        self.limited.append(call.method)

    def forget(self, calls: Any) -> None:
        list(calls)

    def gather(self, *pending: Pending[Any]) -> list[Any]:
        lost = {call.place for one in pending for call in one.calls if call.place.rank in self.dead}
        if lost:
            raise WorkerLost("died", frozenset(lost))
        return [one.combine([call.ref() for call in one.calls]) for one in pending]  # type: ignore[operator]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> tuple[Scene, Streaming]:
    monkeypatch.setattr(dataflow.ray, "put", lambda table: table)
    scene = Scene([Engine(0), Engine(1)])
    return scene, Streaming(scene, scene)  # type: ignore[arg-type]


def ids(rows: pa.Table) -> list[int]:
    return sorted(rows.column("id").to_pylist())


def start(streaming: Streaming) -> None:
    streaming.start([ROWS.slice(0, 4), ROWS.slice(4, 4)], Sampling(1.0, 1.0, -1, 9), (1, 2), version=3)


def test_each_batch_is_spread_over_the_engines_and_a_turn_goes_on_while_some_are_taken(
    scene: tuple[Scene, Streaming],
) -> None:
    (at, streaming) = scene
    assert not streaming.is_running
    start(streaming)
    assert [engine.ids for engine in at.engines] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    taken = streaming.wait(np.array([0, 1, 2, 3]))
    assert ids(taken) == [0, 1, 2, 3] and set(taken.column("finish_reason").to_pylist()) == {"stop"}
    assert streaming.is_running
    assert not at.limited
    assert ids(streaming.stop()) == [4, 5, 6, 7]
    assert not streaming.is_running and at.limited == ["stream", "stream"]
    start(streaming)
    assert at.engines[0].asked == ["stream 1", "wait 1", "stop 1", "stream 2"]
    assert ids(streaming.wait(np.array([6]))) == [6]
    assert at.engines[0].asked[-1] == "stream 2"  # has none of it


def test_a_death_while_some_are_waited_for_ends_the_turn_with_what_the_living_have(
    scene: tuple[Scene, Streaming],
) -> None:
    (at, streaming) = scene
    start(streaming)
    at.dead = {0}
    found = streaming.wait(np.array([0, 2]))
    assert ids(found) == [2, 3, 6, 7]
    ended = dict(zip(found.column("id").to_pylist(), found.column("finish_reason").to_pylist(), strict=True))
    assert ended[2] == "stop" and ended[3] is None  # what the living had handed over is not drawn again
    assert not streaming.is_running
    start(streaming)  # with what is to be drawn, of which these are as good as any
    assert at.engines[1].ids == list(range(8))
    assert ids(streaming.stop()) == list(range(8))


def test_what_was_waited_for_before_a_death_is_not_given_twice(scene: tuple[Scene, Streaming]) -> None:
    (at, streaming) = scene
    start(streaming)
    assert ids(streaming.wait(np.array([1, 3]))) == [1, 3]
    at.dead = {0}
    assert ids(streaming.wait(np.array([0, 2]))) == [2, 6, 7]


def test_a_death_while_others_work_costs_its_responses_alone(scene: tuple[Scene, Streaming]) -> None:
    (at, streaming) = scene
    start(streaming)
    at.survive(WorkerLost("died", frozenset({Place("rollout", 1, "serve", "node", "log")})))
    at.dead = {1}
    assert ids(streaming.stop()) == [0, 1, 4, 5]


def test_when_all_die_there_is_nothing(scene: tuple[Scene, Streaming]) -> None:
    (at, streaming) = scene
    start(streaming)
    at.dead = {0, 1}
    assert streaming.stop().num_rows == 0
