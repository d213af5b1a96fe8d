"""The batch of a step: sampled responses, in several rounds where groups that teach nothing are replaced.

Everything follows from the step, the place in the data and the weights, so that a resumed run samples the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from megappo.cluster.cluster import Cluster
from megappo.cluster.dataflow import Batch, TableRef, put_table
from megappo.cluster.serving import Flight
from megappo.config import Config
from megappo.data import batch as rows_of
from megappo.data.order import PromptOrder
from megappo.data.prompts import PromptSet
from megappo.data.requests import make_requests
from megappo.ppo.dynamic_sampling import informative, next_round
from megappo.report.step_metrics import Metrics
from megappo.workers.settings import Sampling


@dataclass(frozen=True)
class Collected:
    """What :meth:`Collector.collect` gives.

    Attributes:
        batch: the sampled responses, those to one prompt next to each other.
        position: prompts taken from the stream after this step.
        scored: whether the batch has scores already.
        greedy: one greedy response to each prompt, in the order of the batch, where a baseline needs them.
        rounds: responses that were drawn in each round of sampling, where there were rounds.
        metrics: of the sampling.
    """

    batch: Batch
    position: int
    scored: bool = False
    greedy: Batch | None = None
    rounds: Sequence[int] = ()
    metrics: Metrics = field(default_factory=dict)

    @property
    def drawn(self) -> tuple[int, ...]:
        """Responses that were drawn one round after another, the greedy ones last."""
        greedy = () if self.greedy is None else (len(self.greedy.ids),)
        return (*(self.rounds or (len(self.batch.ids),)), *greedy)


@dataclass(frozen=True)
class Begun:
    """A batch that the engines are at.

    Attributes:
        step: that will train on it.
        version: of the weights that it is sampled from.
        position: prompts taken from the stream before it.
        prompts: those of its first round, int64.
        round: their responses.
        greedy: one greedy response to each, where a baseline needs them and the prompts are known.
    """

    step: int
    version: int
    position: int
    prompts: np.ndarray
    round: Flight
    greedy: Flight | None = None


class Collector:
    """Samples responses to a stream of prompts."""

    def __init__(self, config: Config, cluster: Cluster, prompts: PromptSet) -> None:
        rollout = config.roles.rollout
        self.config, self.cluster, self.prompts = config, cluster, prompts
        self.samples = rollout.samples_per_prompt
        self.order = PromptOrder(len(prompts), config.run.seed, config.data.shuffle)
        self.sampling = Sampling(rollout.temperature, rollout.top_p, rollout.top_k, config.data.max_response)
        self.greedy_sampling = Sampling(0.0, 1.0, -1, config.data.max_response)

    def collect(self, step: int, position: int) -> Collected:
        """Sample the batch of a step, which is also the version of the engines' weights.

        Args:
            position: prompts taken from the stream before it.
        """
        return self.finish(self.begin(step, position, version=step))

    def begin(self, step: int, position: int, version: int) -> Begun:
        """Start to sample the batch of a step.

        Args:
            position: prompts taken from the stream before it.
            version: of the engines' weights; if it is an earlier step's, the actor trains meanwhile.
        """
        prompts = self.order.take(position, self.config.data.prompts_per_step)
        begun = Begun(step, version, position, prompts, self._ask(step, version, prompts))
        if not self.config.ppo.needs_greedy or self.config.ppo.dynamic_sampling is not None:
            return begun
        return replace(begun, greedy=self._ask(step, version, prompts, greedy=True))

    def finish(self, begun: Begun) -> Collected:
        """Wait until a batch is there; where groups are to be replaced, sample on until it is full."""
        batch, sampling = self.cluster.finish(begun.round), self.config.ppo.dynamic_sampling
        if sampling is None:
            greedy = None if begun.greedy is None else self.cluster.finish(begun.greedy)
            return Collected(batch, begun.position + len(begun.prompts), greedy=greedy)
        prompts, collected = self._informative(begun, batch, sampling.max_rounds)
        if not self.config.ppo.needs_greedy:
            return collected
        greedy = self.cluster.finish(self._ask(begun.step, begun.version, prompts, greedy=True))
        return replace(collected, greedy=greedy)

    def _informative(self, begun: Begun, batch: Batch, max_rounds: int) -> tuple[np.ndarray, Collected]:
        """(prompt of each group, their responses): those that teach something, filled up with others if need be.

        Args:
            batch: of the first round.
        """
        wanted, taken = self.config.data.prompts_per_step, begun.prompts
        batches: list[Batch] = []
        prompts, useful = np.empty(0, np.int64), np.empty(0, bool)  # of every group so far
        while True:
            with self.cluster.room_for_rewards(begun.version):
                batch = batch.with_columns(*self.cluster.gather(self.cluster.reward.score(batch)))
            scores_gs = rows_of.column(batch.read("score"), "score").reshape(-1, self.samples)
            prompts, useful = np.append(prompts, taken), np.append(useful, informative(scores_gs))
            batches.append(batch)
            seen, rounds = len(prompts), len(batches)
            if useful.sum() >= wanted or rounds >= max_rounds:
                break
            taken = self.order.take(begun.position + seen, next_round(wanted, int(useful.sum()), seen))
            first_id = seen * self.samples
            flight = self._ask(begun.step, begun.version, taken, first_id=first_id, round=rounds)
            batch = self.cluster.finish(flight)
        groups = np.concatenate([np.flatnonzero(useful), np.flatnonzero(~useful)])[:wanted]
        ids = (groups[:, None] * self.samples + np.arange(self.samples)).reshape(-1)
        metrics = {
            "train/num_gen_batches": float(rounds),
            "train/sampled_prompts": float(seen),
            "train/informative_prompts": float(useful.sum()),
        }
        sizes = [len(one.ids) for one in batches]
        batch = Batch.joined(batches).take(ids)
        return prompts[groups], Collected(batch, begun.position + seen, scored=True, rounds=sizes, metrics=metrics)

    def _ask(
        self, step: int, version: int, indices: np.ndarray, *, greedy: bool = False, first_id: int = 0, round: int = 0
    ) -> Flight:
        samples = 1 if greedy else self.samples
        requests = make_requests(self.prompts, indices, samples, first_id)
        return self.cluster.begin(
            put_table(requests.table),
            requests.prompt_tokens,
            self.greedy_sampling if greedy else self.sampling,
            samples=samples,
            seed=(self.config.run.seed, step, *([round] if round else [])),
            version=version,
            ahead=version < step,
        )


def baseline_column(ids: np.ndarray, greedy: Batch) -> list[TableRef]:
    """Of each row's greedy response: ``baseline``, its score (float32), ``baseline_failed`` and ``baseline_tokens``.

    Args:
        ids: the batch's rows, as many to a prompt as to any other, in the order of `greedy`.
        greedy: scored.
    """
    samples = len(ids) // len(greedy.ids)
    scored = greedy.read("score", "failed")
    columns = {
        "baseline": rows_of.column(scored, "score").astype(np.float32),
        "baseline_failed": rows_of.column(scored, "failed").astype(bool),
        "baseline_tokens": greedy.response_tokens,
    }
    repeated = {name: values.repeat(samples) for name, values in columns.items()}
    return [put_table(pa.table({"id": pa.array(ids, pa.int64()), **repeated}))]
