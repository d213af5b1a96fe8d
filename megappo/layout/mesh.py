"""Ranks, their coordinates and the layers they hold, as plain arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

AXES = ("tp", "cp", "dp", "pp")
"""Rank order, fastest first: tensor neighbours share a node, pipeline stages may span nodes (Megatron's default)."""


@dataclass(frozen=True)
class Layout:
    """Sizes of one role's parallel mesh.

    Attributes:
        tp, cp, ep, dp, pp: tensor, context, expert, data and pipeline parallel sizes. Experts are spread over the ranks
            of a pipeline stage, so ``ep`` adds no devices.
        vpp: model chunks per pipeline stage (virtual pipeline); 1 is the plain schedule.
        sequence_parallel: split activations along the sequence inside a tensor-parallel group.
        etp: tensor parallel size inside each expert; 0 means ``tp``, as in Megatron.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    vpp: int = 1
    sequence_parallel: bool = False
    etp: int = 0

    @property
    def world(self) -> int:
        """Number of ranks (devices)."""
        return self.tp * self.cp * self.dp * self.pp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinate of ``rank`` on each axis of :data:`AXES`."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is outside this layout of {self.world} ranks")
        out: dict[str, int] = {}
        for axis in AXES:
            rank, out[axis] = divmod(rank, getattr(self, axis))
        return out

    def micro_batches(self, least: int) -> int:
        """Micro-batches of a pass that needs at least some: a virtual pipeline passes on as many as stages together."""
        group = self.pp if self.vpp > 1 else 1
        return -(-least // group) * group

    @property
    def unlike_stages(self) -> tuple[int, ...]:
        """Pipeline stages of which one is the fullest: the first, the last, and the second for those between.

        These hold equally many layers, often more than the ends (:func:`stage_layers`), and the earlier a stage, the
        more micro-batches it has in flight.
        """
        return tuple(sorted({0, min(1, self.pp - 1), self.pp - 1}))

    @property
    def expert_tp(self) -> int:
        """Tensor parallel size inside each expert."""
        return self.etp or self.tp

    def replicas(self, *, tp: int, pp: int) -> range:
        """The ranks that hold the same dense weights: those of a stage and a tensor-parallel place."""
        return range(self.rank(tp=tp, pp=pp), self.rank(pp=pp + 1), self.tp)

    def expert_replicas(self, *, etp: int, ep: int, pp: int) -> range:
        """The ranks that hold the same expert weights: Megatron's order inside a stage is etp, ep, then the rest.

        Raises:
            ValueError: ``etp * ep`` does not divide the ranks of a stage.
        """
        ranks = self.tp * self.cp * self.dp
        if ranks % (self.expert_tp * self.ep):
            raise ValueError(f"ep: {self.ep} times etp {self.expert_tp} does not divide the {ranks} ranks of a stage")
        return range(self.rank(pp=pp) + etp + self.expert_tp * ep, self.rank(pp=pp + 1), self.expert_tp * self.ep)

    def rank(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The rank at these coordinates: the inverse of :meth:`coordinates`."""
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def groups(self, *axes: str) -> Iterator[list[int]]:
        """Rank lists of the groups that span ``axes``: ranks that differ in those coordinates only, in rank order."""
        buckets: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            at = self.coordinates(rank)
            buckets.setdefault(tuple(at[axis] for axis in AXES if axis not in axes), []).append(rank)
        yield from buckets.values()

    def describe(self) -> str:
        """A short human form, for instance ``tp2 pp2 dp1``."""
        parts = [f"tp{self.tp}", f"pp{self.pp}", f"dp{self.dp}"]
        unusual = [axis for axis in ("cp", "ep", "etp", "vpp") if getattr(self, axis) != getattr(Layout, axis)]
        parts += [f"{axis}{getattr(self, axis)}" for axis in unusual]
        return " ".join(parts + (["sp"] if self.sequence_parallel else []))


@cache
def stage_layers(num_layers: int, pp: int) -> tuple[range, ...]:
    """Global layer indices of each pipeline stage.

    Layers that do not divide evenly are taken off the first and last stage, which also carry the embedding and the
    head; all middle stages hold the same number, which is the form of uneven split that Megatron knows.

    Raises:
        ValueError: fewer layers than stages.
    """
    if not 1 <= pp <= num_layers:
        raise ValueError(f"pp: {pp} stages cannot share {num_layers} layers: legal are 1 to {num_layers}")
    if num_layers % pp == 0 or pp == 1:
        counts = [num_layers // pp] * pp
    else:
        middle = -(-num_layers // pp)
        if num_layers - middle * (pp - 2) < 2:
            middle -= 1
        ends = num_layers - middle * (pp - 2)
        counts = [-(-ends // 2), *[middle] * (pp - 2), ends // 2]
    starts = [sum(counts[:i]) for i in range(pp)]
    return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))


@cache
def held_layers(num_layers: int, pp: int, vpp: int = 1) -> tuple[int, ...]:
    """Number of layers of each pipeline stage, over its chunks. Errors are those of :func:`model_chunks`."""
    return tuple(sum(map(len, chunks)) for chunks in model_chunks(num_layers, pp, vpp))


def model_chunks(num_layers: int, pp: int, vpp: int = 1) -> tuple[tuple[range, ...], ...]:
    """Global layer indices of each model chunk of each pipeline stage.

    A virtual pipeline deals the layers out in ``vpp`` rounds: each round is a plain pipeline over the next
    ``num_layers / vpp`` layers, and chunk ``c`` of a stage is its part of round ``c``.

    Raises:
        ValueError: fewer layers than chunks, layers that do not fill ``vpp`` equal rounds, a virtual pipeline of one
            stage, or an uneven one of two (Megatron divides by the stages between the first and the last).
    """
    if vpp > 1 and pp == 1:
        raise ValueError(f"vpp: {vpp} chunks need pp > 1: set vpp to 1, or raise pp")
    if num_layers % vpp:
        raise ValueError(f"vpp: {vpp} does not divide {num_layers} layers")
    per_round = num_layers // vpp
    if vpp > 1 and pp == 2 and per_round % 2:
        raise ValueError(f"vpp: {vpp} rounds of {per_round} layers do not divide by 2 stages, which Megatron asks for")
    stages = stage_layers(per_round, pp)
    return tuple(
        tuple(range(s.start + chunk * per_round, s.stop + chunk * per_round) for chunk in range(vpp)) for s in stages
    )
