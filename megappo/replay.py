"""Steps on batches of files instead of sampled ones: the same loop without generation."""

from __future__ import annotations

from pathlib import Path

from megappo.cluster.dataflow import batch_of
from megappo.collect import Collected
from megappo.config import Config
from megappo.data.given import limits_of
from megappo.data.order import PromptOrder
from megappo.data.replay import load_replay


class Replayer:
    """In place of :class:`~megappo.ahead.Ahead`: step N takes the N-th file of ``data.replay``.

    A dumped batch with the weights that it was trained on gives the same step again, but for what sampling measures.
    """

    def __init__(self, config: Config, prompts: int) -> None:
        self.config, self.order = config, PromptOrder(prompts, config.run.seed, config.data.shuffle)

    def collect(self, step: int, position: int) -> Collected:
        """Read the batch of a step; see :meth:`megappo.ahead.Ahead.collect`.

        Raises:
            DataError: the file cannot be used.
        """
        rows = load_replay(self.config.data.replay[step], limits_of(self.config))
        scored = "score" in rows.column_names
        batch = batch_of(rows, self.config.run.timeout_s)
        return Collected(batch, position + self.config.data.prompts_per_step, scored)

    def settle(self) -> None:
        """Nothing is generated meanwhile."""

    def save(self, folder: Path) -> None:
        """Nothing is generated ahead."""

    def load(self, folder: Path) -> None:
        """Nothing is generated ahead."""
