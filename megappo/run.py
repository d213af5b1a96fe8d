"""One run as its folder: what it trains on, and everything it leaves behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from megappo.checkpoints import Checkpoints
from megappo.cluster.dataflow import Batch
from megappo.config import Config, dump_config
from megappo.data import batch as rows_of
from megappo.data.prompts import PromptSet, load_prompts
from megappo.report.console import Console
from megappo.report.html import write_report
from megappo.report.roles import describe_roles
from megappo.report.run_log import RunLog
from megappo.report.step_metrics import Metrics, batch_metrics, validation_metrics
from megappo.report.trackers import Trackers

SAMPLES = 8
"""Generations of each step and validation that are written to ``samples.jsonl``."""


@dataclass(frozen=True)
class Requests:
    """Prompts to generate from, one row a response.

    Attributes:
        table: ``id``, ``seed`` and the columns of the prompts.
        prompt_tokens: length of each prompt, int64.
    """

    table: pa.Table
    prompt_tokens: np.ndarray


class Run:
    """The folder of a run, its data and its logs; a context manager.

    Attributes:
        train_prompts, validation_prompts: the prompts; validation may be missing.
        data_sources: all that occur in them.
        console: tells a person what is going on.
        checkpoints: of this run.
    """

    def __init__(self, config: Config) -> None:
        """Read the data and open the folder.

        Raises:
            DataError, ModelError: with words for the user.
        """
        from transformers import AutoTokenizer

        self.config = config
        self.folder = Path(config.run.dir)
        tokenizer = AutoTokenizer.from_pretrained(config.model)
        self.train_prompts = self._load(config.data.train, tokenizer)
        self.validation_prompts = self._load(config.data.validation, tokenizer) if config.data.validation else None
        if self.validation_prompts is not None and config.data.validation_prompts:
            first = np.arange(min(config.data.validation_prompts, len(self.validation_prompts)))
            self.validation_prompts = PromptSet(self.validation_prompts.rows(first), self.validation_prompts.report)
        sets = [prompts for prompts in (self.train_prompts, self.validation_prompts) if prompts is not None]
        self.data_sources = sorted({source for prompts in sets for source in prompts.table["data_source"].to_pylist()})
        self.checkpoints = Checkpoints(self.folder / "checkpoints", config.run.keep_checkpoints)

        self._log = RunLog(self.folder)
        self._trackers: Trackers | None = None
        (self.folder / "config.yaml").write_text(dump_config(config))
        self.console = Console(config.run.steps)
        self.console.start(
            f"megappo: {self.folder}",
            describe_roles(yaml.safe_load(dump_config(config))),
            {"model": config.model, "data": "; ".join(prompts.report.replace("\n", "; ") for prompts in sets)},
        )

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._trackers is not None:
            self._trackers.close()

    def _load(self, files: Sequence[str], tokenizer: Any) -> PromptSet:
        data = self.config.data
        return load_prompts(files, tokenizer, max_prompt=data.max_prompt, overlong=data.overlong)

    def requests(self, prompts: PromptSet, indices: np.ndarray, samples: int, seed: Sequence[int]) -> Requests:
        """``samples`` rows for each prompt, next to each other; each row's seed is a function of ``seed`` alone."""
        table = prompts.rows(np.repeat(indices, samples))
        ids = pa.array(np.arange(table.num_rows), pa.int64())
        seeds = np.random.default_rng(seed).integers(0, 2**31 - 1, table.num_rows)
        table = table.append_column("id", ids).append_column("seed", pa.array(seeds, pa.int64()))
        return Requests(table, rows_of.lengths(table, "prompt_ids"))

    # --- logs ----------------------------------------------------------------------------------------------------

    def start_log(self, resumed_at: int | None) -> None:
        """Open the logs; what a killed run logged after its last checkpoint is dropped, since it comes again."""
        self._log.truncate_after(-1 if resumed_at is None else resumed_at)
        self._trackers = Trackers(
            self.config.run.trackers,
            self.folder,
            config_text=dump_config(self.config),
            resumed_at=resumed_at,
            warn=self.console.warn,
        )
        if resumed_at is not None:
            self.console.status(f"resumed from the checkpoint of step {resumed_at}")

    def log(self, step: int, metrics: Metrics) -> None:
        """Record one step everywhere."""
        assert self._trackers is not None, "start_log comes first"
        self._log.append(step, metrics)
        self._trackers.log(step, metrics)
        self.console.step(step, metrics)

    def keep(self, step: int, batch: Batch) -> Metrics:
        """Dump a training batch and some of its responses; returns the batch's metrics."""
        names = {name for part in batch.parts for name in part[0].columns} - {"id"}
        rows = batch.read(*sorted(names))
        if self.config.run.dump_rollouts:
            folder = self.folder / "rollouts"
            folder.mkdir(exist_ok=True)
            pq.write_table(rows, folder / f"step_{step}.parquet")
        self._log.log_samples(_samples(rows, step, "train"))
        self._warn_of_failed_rewards(rows)
        return batch_metrics(rows, self.config.data.max_prompt, self.config.data.max_response)

    def keep_validation(self, step: int, batch: Batch) -> Metrics:
        """Log some validation responses; returns the validation metrics."""
        columns = ("prompt_text", "response_ids", "response", "score", "ground_truth", "data_source", "prompt_index")
        rows = batch.read(*columns, "extras", "failed", "failure")
        self._log.log_samples(_samples(rows, step, "validation"))
        self._warn_of_failed_rewards(rows)
        return validation_metrics(rows)

    @property
    def is_finished(self) -> bool:
        """Whether a checkpoint of the last step is there: nothing is left to train."""
        latest = self.checkpoints.latest()
        return latest is not None and self.checkpoints.read_state(latest)["step"] >= self.config.run.steps

    def finish(self) -> None:
        """Say how it went and write the report."""
        self.console.finish(f"report: {write_report(self.folder)}")

    def _warn_of_failed_rewards(self, rows: pa.Table) -> None:
        failed = rows_of.column(rows, "failed").astype(bool)
        if failed.any():
            reasons = np.array(rows.column("failure").to_pylist())[failed]
            shown = "; ".join(sorted(set(reasons))[:3])
            self.console.warn(f"{failed.sum()} of {len(failed)} rewards failed and count as 0: {shown}")


def _samples(rows: pa.Table, step: int, kind: str) -> list[dict[str, Any]]:
    table = rows.slice(0, SAMPLES).select(["prompt_text", "response", "score", "ground_truth"])
    return [{"step": step, "kind": kind, "prompt": row.pop("prompt_text"), **row} for row in table.to_pylist()]
