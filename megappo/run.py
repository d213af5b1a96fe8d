"""One run as its folder: what it trains on, and everything it leaves behind."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa

from megappo.check.run_folder import run_findings
from megappo.checkpoints import DATA, UNVALIDATED, Checkpoints
from megappo.cluster.dataflow import Batch
from megappo.config import Config, RunConfig, dump_config
from megappo.data import batch as rows_of
from megappo.data.fingerprint import fingerprint, require_same
from megappo.data.loss_mask import LOSS_MASK
from megappo.data.prompts import PromptSet, load_prompts
from megappo.remote.run import RemoteSide
from megappo.report.console import Console
from megappo.report.html import write_report
from megappo.report.roles import describe_roles
from megappo.report.rollout_dump import RolloutDump
from megappo.report.run_log import RunLog, read_log
from megappo.report.step_metrics import BATCH_COLUMNS, Metrics, batch_metrics
from megappo.report.trackers import Trackers
from megappo.report.validation_metrics import VALIDATION_COLUMNS, canary_metrics, validation_metrics
from megappo.report.versions import VERSIONS_NAME, versions
from megappo.rewards.functions import make_manager
from megappo.rewards.mix import PARTS, check_covered
from megappo.run_lock import RunLock
from megappo.steps import Done, require_progress
from megappo.strict_yaml import parse, to_plain

SAMPLES = 8
"""Generations of each step and validation that are written to ``samples.jsonl``."""
SAMPLE_COLUMNS = ("prompt_text", "response", "score", "ground_truth")
FAILURE_COLUMNS = ("failed", "failure")


class Run:
    """The folder of a run, its data and its logs; a context manager.

    Attributes:
        train_prompts: the prompts to train on.
        data_fingerprint: of them.
        watched_prompts: those of the "validation" and the "canary", where there are any.
        data_sources: all that occur in them.
        console: tells a person what is going on.
        checkpoints: of this run.
    """

    def __init__(self, config: Config) -> None:
        """Lock and open the folder, and read the data.

        Raises:
            RunInUse, DataError, DamagedCheckpoint: with words for the user.
        """
        self.config = config
        self.folder = config.run.folder
        with ExitStack() as ends:
            ends.callback(RunLock(self.folder).release)
            self._open()
            ends.callback(self._remote.close)
            self._remote.start()  # last: of a run that is refused nothing goes up
            self._ends = ends.pop_all()

    def _open(self) -> None:
        from transformers import AutoTokenizer

        config = self.config
        self.console = Console(config.run.steps)
        tokenizer = AutoTokenizer.from_pretrained(config.model_folder("actor"))
        self.train_prompts = self._load(config.data.train, tokenizer)
        watched = {"validation": config.data.validation, "canary": config.data.canary}
        self.watched_prompts = {kind: self._load(files, tokenizer) for kind, files in watched.items() if files}
        if "validation" in self.watched_prompts and config.data.validation_prompts:
            prompts = self.watched_prompts["validation"]
            first = np.arange(min(config.data.validation_prompts, len(prompts)))
            self.watched_prompts["validation"] = PromptSet(prompts.rows(first), prompts.report)
        sets = [self.train_prompts, *self.watched_prompts.values()]
        self.data_sources = sorted({source for prompts in sets for source in prompts.table["data_source"].to_pylist()})

        self._dump = RolloutDump(self.folder)
        # What a checkpoint makes final must be in its file: a resumed run does not come by those steps again.
        self.checkpoints = Checkpoints(
            self.folder / "checkpoints", config.run.keep_checkpoints, before_naming=self._dump.wait
        )
        self._remote = RemoteSide(config.run, self.checkpoints, self.console, lambda: run_findings(config))
        self.data_fingerprint = fingerprint(self.train_prompts.texts())
        if (latest := self.checkpoints.latest()) is not None:
            require_same(self.checkpoints.read_state(latest).get(DATA), self.data_fingerprint, self.folder)
        self._log = RunLog(self.folder)
        self._trackers: Trackers | None = None
        self._done_before = self.done
        stored = self.folder / "config.yaml"
        resumes = latest is not None and stored.is_file()
        self._changes = changed_settings(stored.read_text(), dump_config(config)) if resumes else []
        write_whole(stored, dump_config(config))
        write_whole(self.folder / VERSIONS_NAME, versions())
        self.console.start(
            f"megappo: {title(config.run)}",
            describe_roles(to_plain(config)),
            {
                "model": config.model_folder("actor"),
                "data": "; ".join(prompts.report.replace("\n", "; ") for prompts in sets),
            },
        )

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._ends:
            try:
                self._dump.close()
            except Exception as error:
                if value is None:
                    raise
                # And go on with the first failure.
                self.console.warn(f"the last rollouts could not be written: {error}")
            finally:
                if self._trackers is not None:
                    self._trackers.close(failed=value is not None)

    def _load(self, files: Sequence[str], tokenizer: Any) -> PromptSet:
        data = self.config.data
        return load_prompts(files, tokenizer, max_prompt=data.max_prompt, overlong=data.overlong)

    def check_rewards(self) -> None:
        """Load the reward functions once, before anything expensive starts.

        Raises:
            RewardError: one does not load, is no function of four arguments, or a data source has none.
        """
        reward = self.config.roles.reward.absolute()
        if check_covered(self.data_sources, reward):
            make_manager(replace(reward, processes=1)).close()

    # --- logs ----------------------------------------------------------------------------------------------------

    def start_log(self, resumed_at: int | None, *, validated: bool = True) -> None:
        """Open the logs; what a killed run logged after its last checkpoint is dropped, since it comes again.

        Args:
            resumed_at: the step of that checkpoint.
            validated: whether it was concluded; if not, its validation and its line in the log come again as well.
        """
        self._log.truncate_after(-1 if resumed_at is None else resumed_at, validated=validated)
        if self._trackers is not None:  # the run starts over
            self._trackers.close()
        self._trackers = Trackers(
            self.config.run.trackers,
            self.folder,
            config_text=dump_config(self.config),
            resumed_at=resumed_at if resumed_at is None or validated else resumed_at - 1,
            warn=self.console.warn,
        )
        if resumed_at is not None:
            self.console.went_before(read_log(self.folder))
            self.console.status(f"resumed from the checkpoint of step {resumed_at}")
            if self._changes:
                self.console.status(f"with other settings than before: {', '.join(self._changes)}")

    def log(self, step: int, metrics: Metrics) -> None:
        """Record one step everywhere."""
        assert self._trackers is not None, "start_log comes first"
        self._log.append(step, metrics)
        self._trackers.log(step, metrics)
        self.console.step(step, metrics)
        self._remote.tell()

    def keep(self, step: int, batch: Batch) -> Metrics:
        """Log some of a training batch's responses and, if asked for, dump it whole; returns its metrics."""
        dump = self.config.run.dump_rollouts
        all_columns = batch.columns
        needed = {*BATCH_COLUMNS, *PARTS, LOSS_MASK, "baseline", *SAMPLE_COLUMNS, *FAILURE_COLUMNS} & all_columns
        rows = batch.read(*sorted(all_columns if dump else needed))
        if dump:
            self._dump.write(step, rows)
        self._log.log_samples(_samples(picked(rows), step, "train"))
        self._warn_of_failed_rewards(rows)
        data, masked = self.config.data, self.config.ppo.mask_truncated
        return batch_metrics(rows, data.max_prompt, data.max_response, mask_truncated=masked)

    def keep_validation(self, step: int, batch: Batch, kind: str) -> Metrics:
        """Log some responses of the validation or the canary (the kind); returns its metrics."""
        parts = PARTS.keys() & batch.columns
        rows = batch.read(*sorted({*VALIDATION_COLUMNS, *parts, *SAMPLE_COLUMNS, *FAILURE_COLUMNS}))
        self._log.log_samples(_samples(rows.slice(0, SAMPLES), step, kind))
        self._warn_of_failed_rewards(rows)
        return validation_metrics(rows) if kind == "validation" else canary_metrics(rows)

    @property
    def last_checkpoint(self) -> Path | None:
        """The last complete one, if any."""
        return self.checkpoints.latest()

    def warn(self, text: str) -> None:
        """Tell a person."""
        self.console.warn(text)

    @property
    def done(self) -> Done:
        """How far the run is."""
        latest = self.checkpoints.latest()
        if latest is None:
            return 0, True
        state = self.checkpoints.read_state(latest)
        return state["step"], UNVALIDATED not in state

    @property
    def is_finished(self) -> bool:
        """Whether a checkpoint of the last step is there, and its validation is done."""
        step, validated = self.done
        return validated and step >= self.config.run.steps

    def finish(self) -> None:
        """Say how it went and write the report."""
        self.console.finish(f"report: {write_report(self.folder)}")

    def stopped(self, step: int) -> None:
        """Say that the run ends here as it was asked to, with a checkpoint of this step.

        Raises:
            NoProgress: this command began there as well, so that ending and starting it again would go on forever.
        """
        require_progress(self.done, self._done_before)
        self.console.status(f"stopped after step {step} as SIGUSR1 asked; the same command goes on from its checkpoint")

    def _warn_of_failed_rewards(self, rows: pa.Table) -> None:
        failed = rows_of.column(rows, "failed").astype(bool)
        if failed.any():
            reasons = np.array(rows.column("failure").to_pylist())[failed]
            shown = "; ".join(sorted(set(reasons))[:3])
            self.console.warn(f"{failed.sum()} of {len(failed)} rewards failed and count as 0: {shown}")


def picked(rows: pa.Table) -> pa.Table:
    """SAMPLES rows of a batch, in its order: the first of highest and of lowest score, and the first others."""
    scores = rows_of.column(rows, "score")
    chosen = dict.fromkeys([int(scores.argmax()), int(scores.argmin()), *range(len(scores))])
    return rows.take(sorted([*chosen][:SAMPLES]))


def _samples(rows: pa.Table, step: int, kind: str) -> list[dict[str, Any]]:
    table = rows.select(SAMPLE_COLUMNS)
    return [{"step": step, "kind": kind, "prompt": row.pop("prompt_text"), **row} for row in table.to_pylist()]


def title(run: RunConfig) -> str:
    """Where a run is."""
    return f"{run.dir} (works in {run.folder})" if run.is_remote else run.dir


def changed_settings(before: str, after: str) -> list[str]:
    """``key: old -> new`` of every setting that differs between two resolved configurations, given as YAML."""
    old, new = _leaves(parse(before, [])), _leaves(parse(after, []))
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return [f"{key}: {old.get(key, 'none')} -> {new.get(key, 'none')}" for key in keys]


def _leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {
        key: value
        for name, child in tree.items()
        for key, value in _leaves(child, f"{prefix}.{name}" if prefix else str(name)).items()
    }


def write_whole(path: Path, text: str) -> None:
    """Replace a file's content so that it is the old or the new one, whenever the process is killed."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
