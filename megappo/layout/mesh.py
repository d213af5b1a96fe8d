"""Ranks, their coordinates and the layers they hold, as plain arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

AXES = ("tp", "cp", "dp", "pp")
"""Rank order, fastest first: tensor neighbours share a node, pipeline stages may span nodes (Megatron's default)."""


@dataclass(frozen=True)
class Layout:
    """Sizes of one role's parallel mesh.

    Attributes:
        tp, cp, ep, dp, pp: tensor, context, expert, data and pipeline parallel sizes. Experts are spread over the
            data-parallel ranks, so ``ep`` adds no devices.
        vpp: model chunks per pipeline stage (virtual pipeline); 1 is the plain schedule.
        sequence_parallel: split activations along the sequence inside a tensor-parallel group.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    vpp: int = 1
    sequence_parallel: bool = False

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
        parts += [f"{axis}{getattr(self, axis)}" for axis in ("cp", "ep", "vpp") if getattr(self, axis) > 1]
        return " ".join(parts + (["sp"] if self.sequence_parallel else []))


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
