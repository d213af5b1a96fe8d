"""The weight sync of a run, from the actor's Megatron ranks to the workers of all vLLM engines: its terms."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import prod
from typing import NamedTuple

from megappo.config import Carrier, Verify
from megappo.layout.mesh import Layout
from megappo.models.lora import is_adapter
from megappo.models.parameters import EMBEDDING
from megappo.models.spec import ModelSpec
from megappo.reshard.agreement import Fingerprint, fingerprint
from megappo.reshard.boxes import Shard, megatron_shards, vllm_shards
from megappo.reshard.copies import Copy
from megappo.reshard.intersections import Side, intersections
from megappo.reshard.plan import plan_copies
from megappo.reshard.routes import place


@dataclass(frozen=True)
class TransferSpec:
    """Everything that the plan depends on; every rank computes the same plan from it.

    Ranks of the transfer group: first the actor's ranks, then the engines' workers, engine by engine.

    Attributes:
        model: the actor's; if it has adapters, nothing but these moves, and engines merge them into their weights.
        actor: the actor's layout.
        engines: number of vLLM engines.
        engine_tp: tensor-parallel size of each.
        fused_norms: the actor's layers are Transformer Engine's.
        places: (node, device) of each rank of the group, where known; blocks are then taken from the same device before
            the same node before another.
        forward: what several workers of a node want from another node is sent once and passed on among them.
        expert_parallel: engines deal out whole experts to their workers.
        layerwise: each decoder layer is complete before the next begins, for engines that have to process layers.
    """

    model: ModelSpec
    actor: Layout
    engines: int
    engine_tp: int
    fused_norms: bool
    places: tuple[tuple[str, str], ...] = ()
    forward: bool = False
    expert_parallel: bool = False
    layerwise: bool = False

    @property
    def world(self) -> int:
        """Ranks of the transfer group."""
        return self.actor.world + self.engines * self.engine_tp

    def worker_rank(self, engine: int, tp_rank: int) -> int:
        """Rank of one engine's worker in the transfer group."""
        return self.actor.world + engine * self.engine_tp + tp_rank

    def sources(self) -> list[Shard]:
        """What the actor's ranks hold."""
        return self._moving(megatron_shards(self.model, self.actor, fused_norms=self.fused_norms))

    def destinations(self) -> list[Shard]:
        """What the engines' workers hold."""
        first, experts = self.worker_rank(0, 0), self.expert_parallel
        return self._moving(vllm_shards(self.model, self.engine_tp, self.engines, first, expert_parallel=experts))

    def _moving(self, shards: list[Shard]) -> list[Shard]:
        if self.model.lora is None:
            return shards
        return [Shard(shard.ranks, [box for box in shard.boxes if is_adapter(box.name)]) for shard in shards]

    def plan(self) -> tuple[Copy, ...]:
        """Who sends what to whom."""
        return tuple(plan_copies(self.sources(), self.destinations(), self.places, forward=self.forward))

    def part(self, rank: int) -> tuple[Copy, ...]:
        """What one rank of the transfer group sends and receives, found without the rest of the plan."""
        sides = self.sources(), self.destinations()
        return tuple(plan_copies(*sides, self.places, forward=self.forward, rank=rank))

    def phase(self, copy: Copy) -> int:
        """When a copy is made: see :func:`megappo.reshard.messages.make_messages`."""
        if not self.layerwise or copy.name == EMBEDDING.hf[0]:
            return 0
        layer = re.match(r"model\.layers\.(\d+)\.", copy.name)
        return 1 + (int(layer.group(1)) if layer else self.model.num_layers)

    def fingerprint(self, rank: int, part: tuple[Copy, ...]) -> Fingerprint:
        """What a rank shows to the others before anything is sent; see :func:`megappo.reshard.agreement.disagreement`.

        Args:
            part: the rank's part of the plan.
        """
        return fingerprint(repr(self), rank, part)

    def elements(self) -> int:
        """Elements that all workers receive together: each of theirs once."""
        return sum(len(shard.ranks) * sum(prod(box.size) for box in shard.boxes) for shard in self.destinations())

    def stays_on_device(self) -> bool:
        """Whether every block comes from the device that it goes to."""
        held, wanted = Side(self.sources()), Side(self.destinations())
        pairs = {
            (m.source.shards, m.destination.shards) for name in wanted.names for m in intersections(name, held, wanted)
        }
        return bool(self.places) and all(
            {place(self.places, rank) for rank, _ in wanted.members(destinations)}
            <= {place(self.places, rank) for rank, _ in held.members(sources)}
            for sources, destinations in pairs
        )

    def describe(self, rank: int) -> str:
        """A rank of the transfer group, for people."""
        engine, worker = divmod(rank - self.actor.world, self.engine_tp)
        who = f"actor rank {rank}" if engine < 0 else f"engine {engine} worker {worker}"
        return f"{who} (node {self.places[rank][0]})" if self.places else who


@dataclass(frozen=True)
class Meeting:
    """Where and how the ranks of a transfer meet.

    Attributes:
        host, port: of a :func:`megappo.reshard.gloo.host_store`.
        timeout_s: limit on joining and on each message, in seconds.
        verify: how much of each sync is proven.
        transport: "auto": by where the ranks are; "gloo": over gloo in any case.
    """

    host: str
    port: int
    timeout_s: float
    verify: Verify = "sample"
    transport: Carrier = "auto"


NAMED = 20
"""Lines that are told of what is wrong with weights: of a large model it may be millions."""


def _told(lines: Sequence[str], count: int, what: str) -> str:
    more = count - min(len(lines), NAMED)
    return "\n".join([*lines[:NAMED], *([f"and {more:,} more {what}"] if more else [])])


class Probed(NamedTuple):
    """What a look at an engine's layers found.

    Attributes:
        problems: layers that are refused, or where our table differs from vLLM's loader; one line each.
        staged: layers whose weights go through vLLM's processing.
    """

    problems: tuple[str, ...]
    staged: tuple[str, ...]

    @property
    def complaint(self) -> str:
        """The problems, for people: a line each, and how many more there are."""
        return _told(self.problems, len(self.problems), "parameters")


class Receipt(NamedTuple):
    """What a sync did on one rank, or on several.

    Attributes:
        sent, received: bytes.
        mismatched: regions that did not arrive as they were sent.
        mismatches: some of them, at most :data:`NAMED`, one line each.
    """

    sent: int = 0
    received: int = 0
    mismatched: int = 0
    mismatches: tuple[str, ...] = ()

    @property
    def complaint(self) -> str:
        """What did not arrive, for people: a line each, and how many more there are."""
        return _told(self.mismatches, self.mismatched, "regions")


def total_receipt(receipts: Iterable[Receipt]) -> Receipt:
    """What several ranks did together; of each that misses something a line comes before a second one of any."""
    sent, received, mismatched, mismatches = zip(*receipts, strict=True)
    by_turns = [line for lines in zip_longest(*mismatches) for line in lines if line is not None]
    return Receipt(sum(sent), sum(received), sum(mismatched), tuple(by_turns[:NAMED]))
