"""Steps on batches of files instead of sampled ones: the same loop without generation."""

from __future__ import annotations

from megappo.cluster.dataflow import Batch, put_table
from megappo.collect import Collected
from megappo.config import Config
from megappo.data import batch as rows_of
from megappo.data.order import PromptOrder
from megappo.data.replay import load_replay


class Replayer:
    """In place of a :class:`~megappo.collect.Collector`: step N takes the N-th file of ``data.replay``.

    A dumped batch with the weights that it was trained on gives the same step again, but for what sampling measures.
    """

    def __init__(self, config: Config, order: PromptOrder) -> None:
        self.config, self.order = config, order

    def collect(self, step: int, position: int) -> Collected:
        """Read the batch of a step; see :meth:`megappo.collect.Collector.collect`.

        Raises:
            DataError: the file cannot be used.
        """
        rows = load_replay(self.config.data.replay[step])
        responses = rows_of.lengths(rows, "response_ids")
        tokens = rows_of.lengths(rows, "prompt_ids") + responses - 1
        batch = Batch(rows_of.column(rows, "id"), tokens, responses, ((put_table(rows),),))
        return Collected(batch, position + self.config.data.prompts_per_step, scored="score" in rows.column_names)
