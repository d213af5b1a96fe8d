"""The batch of a step: sampled responses, in several rounds where groups that teach nothing are replaced.

Everything follows from the step, the place in the data and the weights, so that a resumed run samples the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from megappo.cluster.cluster import Cluster
from megappo.cluster.dataflow import Batch, TableRef, put_table
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
        metrics: of the sampling.
    """

    batch: Batch
    position: int
    scored: bool = False
    greedy: Batch | None = None
    metrics: Metrics = field(default_factory=dict)


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
        """Sample the batch of a step.

        Args:
            step: the step, which is also the version of the engines' weights.
            position: prompts taken from the stream before it.
        """
        wanted = self.config.data.prompts_per_step
        if self.config.ppo.dynamic_sampling is None:
            taken = self.order.take(position, wanted)
            collected = Collected(self._generate(step, taken), position + wanted)
        else:
            taken, collected = self._collect_informative(step, position, self.config.ppo.dynamic_sampling.max_rounds)
        if not self.config.ppo.needs_greedy:
            return collected
        greedy = self._generate(step, taken, greedy=True)
        return Collected(collected.batch, collected.position, collected.scored, greedy, collected.metrics)

    def _collect_informative(self, step: int, position: int, max_rounds: int) -> tuple[np.ndarray, Collected]:
        """(prompt of each group, their responses): those that teach something, filled up with others if need be."""
        wanted, seen, rounds = self.config.data.prompts_per_step, 0, 0
        batches: list[Batch] = []
        prompts, useful = np.empty(0, np.int64), np.empty(0, bool)  # of every group so far
        while useful.sum() < wanted and rounds < max_rounds:
            count = next_round(wanted, int(useful.sum()), seen)
            taken = self.order.take(position + seen, count)
            batch = self._generate(step, taken, first_id=seen * self.samples, round=rounds)
            batch = batch.with_columns(*self.cluster.gather(self.cluster.reward.score(batch)))
            scores_gs = rows_of.column(batch.read("score"), "score").reshape(-1, self.samples)
            prompts, useful = np.append(prompts, taken), np.append(useful, informative(scores_gs))
            batches.append(batch)
            seen, rounds = seen + count, rounds + 1
        groups = np.concatenate([np.flatnonzero(useful), np.flatnonzero(~useful)])[:wanted]
        ids = (groups[:, None] * self.samples + np.arange(self.samples)).reshape(-1)
        metrics = {
            "train/num_gen_batches": float(rounds),
            "train/sampled_prompts": float(seen),
            "train/informative_prompts": float(useful.sum()),
        }
        batch = Batch.joined(batches).take(ids)
        return prompts[groups], Collected(batch, position + seen, scored=True, metrics=metrics)

    def _generate(
        self, step: int, indices: np.ndarray, *, greedy: bool = False, first_id: int = 0, round: int = 0
    ) -> Batch:
        samples = 1 if greedy else self.samples
        requests = make_requests(self.prompts, indices, samples, first_id)
        return self.cluster.generate(
            put_table(requests.table),
            requests.prompt_tokens,
            self.greedy_sampling if greedy else self.sampling,
            samples=samples,
            seed=(self.config.run.seed, step, *([round] if round else [])),
            version=step,
        )


def baseline_column(ids: np.ndarray, greedy: Batch) -> list[TableRef]:
    """``baseline`` of every row (float32): the score of the greedy response to its prompt.

    Args:
        ids: the batch's rows, as many to a prompt as to any other, in the order of `greedy`.
        greedy: scored.
    """
    scores = rows_of.column(greedy.read("score"), "score").astype(np.float32)
    baselines = np.repeat(scores, len(ids) // len(scores))
    return [put_table(pa.table({"id": pa.array(ids, pa.int64()), "baseline": baselines}))]
