"""The weight sync of a run: from the actor's Megatron ranks to the workers of all vLLM engines."""

from __future__ import annotations

from dataclasses import dataclass

from megappo.layout.mesh import Layout
from megappo.models.spec import ModelSpec
from megappo.reshard.boxes import megatron_boxes, vllm_boxes
from megappo.reshard.plan import Copy, make_plan


@dataclass(frozen=True)
class TransferSpec:
    """Everything that the plan depends on; every rank computes the same plan from it.

    Ranks of the transfer group: first the actor's ranks, then the engines' workers, engine by engine.

    Attributes:
        actor: the actor's layout.
        engines: number of vLLM engines.
        engine_tp: tensor-parallel size of each.
        fused_norms: the actor's layers are Transformer Engine's.
        places: (node, device) of each rank of the group, where known; blocks are then taken from the same device before
            the same node before another.
    """

    model: ModelSpec
    actor: Layout
    engines: int
    engine_tp: int
    fused_norms: bool
    places: tuple[tuple[str, str], ...] = ()

    @property
    def world(self) -> int:
        """Ranks of the transfer group."""
        return self.actor.world + self.engines * self.engine_tp

    def worker_rank(self, engine: int, tp_rank: int) -> int:
        """Rank of one engine's worker in the transfer group."""
        return self.actor.world + engine * self.engine_tp + tp_rank

    def plan(self) -> tuple[Copy, ...]:
        """Who sends what to whom."""
        sources = [
            box
            for rank in range(self.actor.world)
            for box in megatron_boxes(self.model, self.actor, rank, fused_norms=self.fused_norms)
        ]
        destinations = [
            box
            for engine in range(self.engines)
            for tp_rank in range(self.engine_tp)
            for box in vllm_boxes(self.model, self.engine_tp, tp_rank, self.worker_rank(engine, tp_rank))
        ]
        return make_plan(sources, destinations, self._distance)

    def stays_on_device(self) -> bool:
        """Whether every block comes from the device that it goes to."""
        return bool(self.places) and all(self._distance(copy.source, copy.destination) == 0 for copy in self.plan())

    def _distance(self, source: int, destination: int) -> int:
        if not self.places:
            return 0
        (node, device), (to_node, to_device) = self.places[source], self.places[destination]
        return 2 if node != to_node else 1 if device != to_device else 0
