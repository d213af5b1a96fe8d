"""Worker groups: a role as the driver sees it. Methods start work and return at once; ``Calls.gather`` waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray

from megappo.cluster.calls import Calls, Pending, Place, one
from megappo.cluster.dataflow import Batch, TableRef
from megappo.config import SCALAR_HEAD, MegatronRoleConfig, OptimizerConfig, PoolConfig, RunConfig
from megappo.data.loss_mask import LOSS_MASK
from megappo.fit.devices import layout_on
from megappo.layout.mesh import Layout
from megappo.ppo.balance import balanced_partition, unit_rows, unit_sums
from megappo.workers.settings import MiniBatch, RoleSettings, Sampling, Totals


@dataclass(frozen=True)
class Member:
    """One process of a group."""

    actor: Any
    place: Place
    device: str = ""  # index on its node; several, with commas, for an engine; empty on CPU


@dataclass(frozen=True)
class Group:
    """Processes that are called together."""

    members: tuple[Member, ...]
    calls: Calls

    def each(
        self, method: str, arguments: Callable[[int], Sequence[Any]], combine: Callable[[list[Any]], Any] = list
    ) -> Pending[Any]:
        """Call ``method`` on every member, with arguments by its number."""
        calls = [
            self.calls.start(member.place, method, getattr(member.actor, method).remote(*arguments(index)))
            for index, member in enumerate(self.members)
        ]
        return Pending(tuple(calls), combine)


@dataclass(frozen=True)
class MegatronGroup(Group):
    """A Megatron role on all processes of its pool; or the model under its adapters, as another role that scores."""

    role: str
    layout: Layout
    without_adapters: bool = False

    def base(self, role: str) -> MegatronGroup:
        """This role without its adapters, which is known as ``role``."""
        members = tuple(replace(member, place=replace(member.place, role=role)) for member in self.members)
        return replace(self, members=members, without_adapters=True)

    def build(
        self, role: MegatronRoleConfig, folder: str, run: RunConfig, optimizer: OptimizerConfig | None = None
    ) -> Pending[Any]:
        """Build the role and load its weights.

        Args:
            role: as configured.
            folder: of its model.
            optimizer: given if it trains.
        """
        settings = RoleSettings(
            folder=folder,
            layout=self.layout,
            dtype=run.dtype,
            micro_batch_tokens=role.micro_batch_tokens,
            scalar_head=self.role in SCALAR_HEAD,
            optimizer=optimizer,
            timeout_s=run.timeout_s,
            recompute=role.recompute,
            fp8=role.fp8,
            offload=role.offload,
            lora=role.lora,
            seed=run.seed,
        )
        return self.each("build", lambda rank: (self.role, settings))

    def score(
        self, method: str, batch: Batch, *, columns: Sequence[str] = ("prompt_ids", "response_ids"), **options: Any
    ) -> Pending[list[TableRef]]:
        """Run a method that scores rows (``logprobs``, ``values``), balanced over data-parallel ranks."""
        shares = self._shares(batch.tokens)
        if self.without_adapters:
            options["without_adapters"] = True

        def arguments(rank: int) -> tuple[Any, ...]:
            ids = batch.ids[shares[self._dp(rank)]]
            return self.role, method, batch.select(columns, ids), options

        return self.each("score", arguments, tables)

    def update(
        self, batch: Batch, mini_batches: Sequence[np.ndarray], objective: Any, learning_rate: float
    ) -> Pending[dict[str, float]]:
        """Train on mini-batches, each given as positions in the batch; its rows are balanced over data-parallel ranks.

        A mini-batch with fewer rows than ranks leaves some ranks without rows, which is fine.
        """
        mask = {LOSS_MASK} & batch.columns
        columns = ("prompt_ids", "response_ids", *objective.columns, *mask)
        steps: list[list[MiniBatch]] = [[] for _ in range(self.layout.dp)]
        for rows in mini_batches:
            totals = Totals(rows=len(rows), tokens=int(batch.trained_tokens[rows].sum()))
            for dp_rank, share in enumerate(self._shares(batch.tokens[rows], objective.unit)):
                steps[dp_rank].append(MiniBatch(batch.ids[rows[share]], totals))

        def arguments(rank: int) -> tuple[Any, ...]:
            own = steps[self._dp(rank)]
            ids = np.unique(np.concatenate([mini.ids for mini in own]))
            return self.role, batch.select(columns, ids), own, objective, learning_rate

        return self.each("update", arguments, one)

    def save(self, folder: str) -> Pending[Any]:
        """Write the role's checkpoint."""
        return self.each("save", lambda rank: (self.role, folder))

    def load(self, folder: str) -> Pending[Any]:
        """Read the role's checkpoint."""
        return self.each("load", lambda rank: (self.role, folder))

    def _dp(self, rank: int) -> int:
        return self.layout.coordinates(rank)["dp"]

    def _shares(self, tokens: np.ndarray, unit: int = 1) -> list[np.ndarray]:
        shares = balanced_partition(unit_sums(tokens, unit).tolist(), self.layout.dp)
        return [unit_rows(share, unit) for share in shares]


@dataclass(frozen=True)
class Generation:
    """What a group of engines is asked to generate.

    Attributes:
        shares: the arguments of each engine. A share's result follows from them and the weights, whichever engine
            takes it.
        combine: makes the batch of the results: references to the rows, in the order of the shares, and of each the
            names of its columns and the length of each response.
    """

    shares: tuple[tuple[Any, ...], ...]
    combine: Callable[[Sequence[ray.ObjectRef], Sequence[tuple[tuple[str, ...], np.ndarray]]], Batch]


@dataclass(frozen=True)
class RolloutGroup(Group):
    """All vLLM engines."""

    def generation(
        self,
        requests: TableRef,
        prompt_tokens: np.ndarray,
        sampling: Sampling,
        *,
        samples: int,
        seed: Sequence[int],
        version: int,
    ) -> Generation:
        """One response a row; all samples of a prompt on the same engine, which computes the prompt once.

        Args:
            requests: ``id``, ``prompt_ids`` and whatever else the batch shall carry.
            prompt_tokens: length of each prompt, int64.
            samples: rows of each prompt, which follow each other.
            seed: all randomness follows from it and the number of engines.
            version: of the weights that the engines must have.
        """
        ids, engines = requests.ids, len(self.members)
        pieces = [piece.reshape(-1) for piece in np.array_split(ids.reshape(-1, samples), engines)]
        seeds = np.random.default_rng(seed).integers(0, 2**31 - 1, engines).tolist()
        asked = Batch(ids, prompt_tokens, np.zeros_like(prompt_tokens), ((requests,),))

        def combine(rows: Sequence[ray.ObjectRef], told: Sequence[tuple[tuple[str, ...], np.ndarray]]) -> Batch:
            names, response_lengths = zip(*told, strict=True)
            lengths = np.concatenate(response_lengths)
            parts = ((requests,), tuple(map(TableRef, rows, pieces, names)))
            return Batch(ids, prompt_tokens + lengths - 1, lengths, parts, limit_s=self.calls.timeout_s)

        selected = [asked.select(("prompt_ids",), piece) for piece in pieces]
        shares = [(rows, sampling, number, version) for rows, number in zip(selected, seeds, strict=True)]
        return Generation(tuple(shares), combine)

    def ask(
        self, method: str, arguments: Callable[[int], Sequence[Any]], combine: Callable[[list[Any]], Any] = list
    ) -> Pending[Any]:
        """Call any other method of every engine, with arguments by its number."""
        calls = [
            self.calls.start(member.place, method, member.actor.call.remote(method, *arguments(engine)))
            for engine, member in enumerate(self.members)
        ]
        return Pending(tuple(calls), combine)


def tables(results: list[TableRef | None]) -> list[TableRef]:
    """What the members that report gave."""
    return [table for table in results if table is not None]


def megatron_groups(
    roles: Mapping[str, MegatronRoleConfig],
    pools: Mapping[str, PoolConfig],
    members: Mapping[str, Sequence[Member]],
    calls: Calls,
) -> dict[str, MegatronGroup]:
    """A group for each role, of all processes of its pool.

    Data parallelism is what tensor and pipeline parallelism leave of the pool.

    Args:
        members: the processes of each pool.
    """
    groups = {}
    for name, role in roles.items():
        ranks = tuple(replace(one, place=replace(one.place, role=name)) for one in members[role.pool])
        groups[name] = MegatronGroup(ranks, calls, name, layout_on(role, pools))
    return groups
