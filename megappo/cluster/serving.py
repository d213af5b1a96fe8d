"""The engines in service: what they generate comes complete, also when one of them dies meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any

import ray

from megappo.cluster.calls import Call, Calls, Pending, WorkerLost
from megappo.cluster.dataflow import Batch
from megappo.cluster.groups import Generation, Group, Member, RolloutGroup
from megappo.cluster.start import RunStarter
from megappo.cluster.weights import WeightSync
from megappo.workers.settings import EngineSettings

Asked = tuple[ray.ObjectRef, Call]


@dataclass(eq=False)
class Flight:
    """A batch that is being generated.

    Attributes:
        asked: for each share, a reference to its rows, which are the driver's and outlive their engine; and the call.
            It changes when an engine dies meanwhile.
    """

    generation: Generation
    version: int
    ahead: bool
    asked: list[Asked]

    @property
    def pending(self) -> Pending[Batch]:
        """All of it."""
        rows, calls = zip(*self.asked, strict=True)
        return Pending(calls, partial(self.generation.combine, rows))


class Serving:
    """Engines that have devices of their own. One that dies is replaced; the others take over what it was asked.

    Nobody waits for a successor that is starting before the next weight sync, unless no engine is left.

    Its state: what is being generated; the successors that are starting, by number of the engine; and how many died
    since the last weight sync.
    """

    def __init__(
        self,
        starter: RunStarter,
        settings: EngineSettings,
        weights: WeightSync,
        *,
        replacements: int,
        status: Callable[[str], None],
    ) -> None:
        """Take over engines that are built and connected.

        Args:
            replacements: how many may be replaced between two weight syncs; with 0 a death ends the run.
            status: told when one dies.
        """
        self._starter, self._settings, self._weights = starter, settings, weights
        self._calls: Calls = starter.calls
        self._limit, self._replaced, self._status = replacements, 0, status
        self._successors: dict[int, tuple[Member, Pending[Any]]] = {}
        self._flights: list[Flight] = []
        self._losing: list[Callable[[Collection[int]], None]] = []

    @property
    def group(self) -> RolloutGroup:
        """The engines, successors of dead ones among them."""
        return self._weights.rollout

    def members(self, version: int) -> list[Member]:
        """The engines in service, which have weights of this version; the actor has them too.

        If none is left, successors get them.
        """
        if not self._in_service():
            self._connect_successors()
            self._weights.sync(version)
        return self._in_service()

    def on_loss(self, told: Callable[[Collection[int]], None]) -> None:
        """Have this called with the numbers of engines that died."""
        self._losing.append(told)

    def begin(self, asked: Callable[[RolloutGroup], Generation], version: int, *, ahead: bool = False) -> Flight:
        """Start to generate with weights of this version.

        Args:
            ahead: the actor trains meanwhile, or has trained already. Its weights are not these then, and if no engine
                is left, successors could not get them. Otherwise it has these weights.
        """
        if not ahead:
            self.members(version)
        generation = asked(self.group)
        flight = Flight(generation, version, ahead, [*self._ask(generation, range(len(generation.shares)))])
        self._flights.append(flight)
        return flight

    def finish(self, flight: Flight) -> Batch:
        """Wait for what :meth:`begin` started.

        Raises:
            WorkerLost: more engines died than may be replaced, or other workers.
        """
        try:
            while True:
                try:
                    (batch,) = self._calls.gather(flight.pending)
                    return batch
                except WorkerLost as loss:
                    self.survive(loss)
        finally:
            self._flights.remove(flight)

    def survive(self, loss: WorkerLost) -> None:
        """Have the others take over what dead engines were asked, wherever it was noticed that they died.

        Raises:
            WorkerLost: the same, if that is not all there is to it.
        """
        self._replace(loss)
        for told in self._losing:
            told({place.rank for place in loss.died})
        for flight in self._flights:
            self._redistribute(flight, loss)

    def sync_weights(self, version: int) -> int:
        """See :meth:`WeightSync.sync`; engines that died while they had nothing to do are replaced before."""
        if self._limit:
            try:
                self._calls.gather(Group(tuple(self._in_service()), self._calls).each("whereabouts", lambda _: ()))
            except WorkerLost as loss:
                self._replace(loss)
        self._connect_successors()
        self._replaced = 0
        return self._weights.sync(version)

    def _replace(self, loss: WorkerLost) -> None:
        """Start successors of the engines that died; raises the loss again if that is not all there is to it."""
        dead = {place.rank for place in loss.died}
        self._replaced += len(dead)
        only_engines = dead and all(place.role == "rollout" for place in loss.died)
        if not only_engines or self._replaced > self._limit or dead & self._successors.keys():
            raise loss
        self._status(f"lost: {loss}\nstarting in its place: {', '.join(f'engine {rank}' for rank in sorted(dead))}")
        for rank in dead:
            ray.kill(self.group.members[rank].actor)  # and what it may have left on its devices
            member = self._starter.engine(rank)
            build = Group((member,), self._calls).each("build", lambda _: (self._settings,))
            self._successors[rank] = member, build

    def _redistribute(self, flight: Flight, loss: WorkerLost) -> None:
        """The same generation without the dead; what they had done comes again, as it may be gone with their node."""
        dead = {place.rank for place in loss.died}
        lost = [share for share, (_, call) in enumerate(flight.asked) if call.place.rank in dead]
        self._calls.forget(flight.asked[share][1] for share in lost)
        if flight.ahead and not self._in_service():
            raise loss
        if not flight.ahead:
            self.members(flight.version)
        for share, asked in zip(lost, self._ask(flight.generation, lost), strict=True):
            flight.asked[share] = asked

    def _ask(self, generation: Generation, shares: Iterable[int]) -> Iterator[Asked]:
        """Ask for shares: each of the engine of its number, or by turns of those that are in service."""
        serving = {member.place.rank: member for member in self._in_service()}
        others = cycle(serving.values())
        for share in shares:
            member = serving.get(share) or next(others)
            rows, ref = member.actor.generate.remote(*generation.shares[share])
            yield rows, self._calls.start(member.place, "generate", ref)

    def _in_service(self) -> list[Member]:
        return [member for rank, member in enumerate(self.group.members) if rank not in self._successors]

    def _connect_successors(self) -> None:
        """Wait for successors that are starting, and let them join the weight sync: they serve after the next one."""
        if not self._successors:
            return
        self._calls.gather(*(build for _, build in self._successors.values()))
        (located,) = self._starter.located([member for member, _ in self._successors.values()])
        found = dict(zip(self._successors, located, strict=True))
        members = tuple(found.get(rank, member) for rank, member in enumerate(self.group.members))
        self._successors = {}
        self._weights.reconnect(replace(self.group, members=members))
        self._status(f"back in service after this weight sync: {', '.join(f'engine {rank}' for rank in sorted(found))}")
