"""Training on given responses: a reward model on pairs (Bradley-Terry), or a policy on text to imitate."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megappo.check.supervised import supervised_folder_findings
from megappo.checkpoints import DATA, UNVALIDATED, Checkpoints
from megappo.cluster.calls import Pending
from megappo.cluster.dataflow import TableRef, batch_of, get_table
from megappo.cluster.forks import Forks
from megappo.cluster.training import TrainingCluster
from megappo.config import SupervisedConfig, Task, dump_config
from megappo.data import batch as rows_of
from megappo.data.examples import Examples, load_pairs, load_responses
from megappo.data.fingerprint import require_same
from megappo.data.order import PromptOrder
from megappo.ppo.schedule import learning_rate
from megappo.remote.run import RemoteSide
from megappo.report.console import Console
from megappo.report.roles import describe_roles
from megappo.report.run_log import RunLog
from megappo.report.step_metrics import Metrics
from megappo.report.trackers import Trackers
from megappo.report.versions import VERSIONS_NAME, versions
from megappo.run import changed_settings, title, write_whole
from megappo.run_lock import RunLock
from megappo.steps import Done, is_due, require_progress, take_steps
from megappo.stop_request import StopRequest, stop_request
from megappo.strict_yaml import to_plain
from megappo.workers.objectives import Objective
from megappo.workers.supervised_objectives import PairObjective, ResponseObjective

ROLES: dict[Task, str] = {"reward-train": "reward", "sft": "actor"}
"""What is trained: the name of its checkpoints, as ``megappo convert --role`` knows it."""


def train_on_examples(config: SupervisedConfig, task: Task, forks: Forks | None = None) -> bool:
    """Train as configured, from the beginning or from the run's last complete checkpoint.

    Args:
        forks: what to fork processes from.

    Returns:
        Whether all steps are done, and validated; if not, SIGUSR1 asked for an early end, and a checkpoint holds what
        is done.

    Raises:
        DataError, PoolError, StackError, WorkerFailed, RunInUse, NoProgress: with words for the user.
    """
    with ExitStack() as stack:
        stop = stack.enter_context(stop_request())
        lock = RunLock(config.run.folder)
        stack.callback(lock.release)
        trainer = _Trainer(config, task, stop)
        stack.callback(trainer.remote.close)
        trainer.remote.start()
        if trainer.is_finished:
            trainer.console.finish(
                f"step {config.run.steps} of {config.run.steps} is done: {trainer.checkpoints.latest()}"
            )
            return True
        cluster = stack.enter_context(TrainingCluster(config, ROLES[task], trainer.console.status, forks))
        return trainer.run(cluster)


@dataclass(frozen=True)
class _Kind:
    """What differs between the tasks."""

    load: Any
    objective: Objective
    method: str
    options: dict[str, Any]


KINDS: dict[Task, _Kind] = {
    "reward-train": _Kind(load_pairs, PairObjective(), "values", {}),
    "sft": _Kind(load_responses, ResponseObjective(), "logprobs", {"column": "logprobs", "temperature": 1.0}),
}


class _Trainer:
    """The loop. Its state is the step; all else is in the workers or follows from it."""

    def __init__(self, config: SupervisedConfig, task: Task, stop: StopRequest) -> None:
        from transformers import AutoTokenizer

        self.config, self.task, self.kind, self.stop = config, task, KINDS[task], stop
        tokenizer = AutoTokenizer.from_pretrained(config.model_folder)
        self.train = self._load(config.data.train, tokenizer)
        self.validation = self._load(config.data.validation, tokenizer) if config.data.validation else None
        self.order = PromptOrder(len(self.train), config.run.seed, config.data.shuffle)
        folder = config.run.folder
        self.console = Console(config.run.steps)
        self.checkpoints = Checkpoints(folder / "checkpoints", config.run.keep_checkpoints)
        self.remote = RemoteSide(config.run, self.checkpoints, self.console, lambda: supervised_folder_findings(config))
        latest = self.checkpoints.latest()
        state: dict[str, Any] = {"step": 0} if latest is None else self.checkpoints.read_state(latest)
        require_same(state.get(DATA), self.train.fingerprint, folder)
        self.step, self.unvalidated = state["step"], state.get(UNVALIDATED)
        self.log = RunLog(folder)
        stored, text = folder / "config.yaml", dump_config(config)
        self.changes = changed_settings(stored.read_text(), text) if latest and stored.is_file() else []
        write_whole(stored, text)
        write_whole(folder / VERSIONS_NAME, versions())
        plain = to_plain(config)
        rows = describe_roles({"pools": plain["pools"], "roles": {ROLES[task]: plain["role"]}})
        sets = [one.report.replace("\n", "; ") for one in (self.train, self.validation) if one is not None]
        facts = {"model": config.model_folder, "data": "; ".join(sets)}
        self.console.start(f"megappo {task}: {title(config.run)}", rows, facts)

    def _load(self, files: tuple[str, ...], tokenizer: Any) -> Examples:
        return self.kind.load(files, tokenizer, max_tokens=self.config.data.max_tokens)

    def run(self, cluster: TrainingCluster) -> bool:
        """All steps that are left; see :func:`train_on_examples`."""
        config, self.cluster = self.config, cluster
        latest = self.checkpoints.latest()
        logged = None if latest is None else self.step - (self.unvalidated is not None)
        if latest is not None:
            cluster.calls.gather(cluster.model.load(str(latest / ROLES[self.task])))
            changed = f", with other settings than before: {', '.join(self.changes)}" if self.changes else ""
            self.console.status(f"resumed from the checkpoint of step {self.step}{changed}")
        self.log.truncate_after(-1 if logged is None else logged)
        self.trackers = Trackers(
            config.run.trackers,
            config.run.folder,
            config_text=dump_config(config),
            resumed_at=logged,
            warn=self.console.warn,
        )
        with self.trackers:
            before = self.done
            if not self.stop.asked:  # else no step comes after it
                if self.step == 0 and config.run.validate_before:
                    self._record(self.validate())
                if latest is not None and self.unvalidated is not None:
                    self.catch_up(latest, self.unvalidated)
            # For want of time the last step may be done, but not validated.
            if not take_steps(self, config.run.steps, self.stop) or not self.is_finished:
                require_progress(self.done, before)
                self.console.status(f"stopped after step {self.step}, as SIGUSR1 asked")
                return False
        self.console.finish(f"checkpoint: {self.checkpoints.latest()}")
        return True

    def train_step(self) -> bool:
        """One step, with validation and checkpoint where they are due. Returns whether a checkpoint holds it.

        Where a signal has asked for an end, the time for a checkpoint may be short: it is written at once, and the
        validation comes when the run goes on (:meth:`catch_up`).
        """
        run, began = self.config.run, time.time()
        size, position = self.config.data.batch, self.step * self.config.data.batch
        rows = batch_of(self.train.rows(self.order.take(position, size)), run.timeout_s)
        rate = learning_rate(self.step, peak=self.config.lr, total_steps=run.steps, optimizer=self.config.optimizer)
        everything = np.arange(len(rows.ids))
        update = self.cluster.model.update(rows, [everything], self.kind.objective, rate)
        (trained,) = self.cluster.calls.gather(update)
        self.step += 1
        seconds = time.time() - began
        metrics: Metrics = {
            # A role calls its statistics by its head: those of a scalar one are a critic's.
            **{name.replace("critic/", "train/").replace("actor/", "train/"): x for name, x in trained.items()},
            "train/lr": rate,
            "training/global_step": self.step,
            "training/epoch": self.order.epoch(position),
            "timing_s/step": seconds,
            "perf/total_num_tokens": float(rows.tokens.sum()),
            "perf/throughput": float(rows.tokens.sum()) / seconds / len(self.cluster.model.members),
        }
        if is_due(self.step, run.validate_every, run.steps):
            if self.stop.asked and self.validation is not None:
                self.save(metrics, validated=False)
                return True
            metrics |= self.validate()
        if saved := self.stop.asked or is_due(self.step, run.checkpoint_every, run.steps):
            self.save(metrics)
        else:
            self._record(metrics)
        return saved

    @property
    def done(self) -> Done:
        """How far the run is."""
        return self.step, self.unvalidated is None

    @property
    def is_finished(self) -> bool:
        """Whether all steps are done, and validated."""
        return self.unvalidated is None and self.step >= self.config.run.steps

    def catch_up(self, checkpoint: Path, metrics: Metrics) -> None:
        """Validate and log the step of a checkpoint that had to be written before.

        Args:
            metrics: of the step, as far as it was done.
        """
        self._record({**metrics, **self.validate()})
        self.unvalidated = None
        self.checkpoints.amend(checkpoint, self.state, None)

    def validate(self) -> Metrics:
        """Loss on the validation examples, how often the chosen side of a pair has the higher score; and the time."""
        if self.validation is None:
            return {}
        began = time.time()
        return {**self._validate(self.validation), "timing_s/testing": time.time() - began}

    def _validate(self, examples: Examples) -> Metrics:
        rows = batch_of(examples.rows(np.arange(len(examples))), self.config.run.timeout_s)
        scoring: Pending[list[TableRef]] = self.cluster.model.score(self.kind.method, rows, **self.kind.options)
        (tables,) = self.cluster.calls.gather(scoring)
        scored = rows_of.take_ids(get_table(tables, rows.limit_s).combine_chunks(), rows.ids)
        if self.task == "sft":
            loss = -float(rows_of.flat(scored, "logprobs").mean(dtype=np.float64))
            return {"val/loss": loss, "val/perplexity": math.exp(min(loss, 700.0))}
        values = rows_of.flat(scored, "values").astype(np.float64).reshape(-1, 2)
        margins = rows_of.flat(examples.table, "margin")[::2]
        gaps = values[:, 0] - values[:, 1]
        loss = float(np.logaddexp(0.0, margins - gaps).mean())
        return {"val/loss": loss, "val/accuracy": float((gaps > 0).mean()), "val/gap": float(gaps.mean())}

    def save(self, metrics: Metrics, *, validated: bool = True) -> None:
        """Write a checkpoint, complete or not at all, and the step's line in the log before it gets its name.

        Args:
            validated: whether the step is done; if not, the checkpoint keeps its metrics, and no line is written.
        """
        began = time.time()
        with self.checkpoints.writing(self.step) as folder:
            self.cluster.calls.gather(self.cluster.model.save(str(folder / ROLES[self.task])))
            metrics = {**metrics, "timing_s/save_checkpoint": time.time() - began}
            if not validated:
                self.unvalidated = {name: x if isinstance(x, int) else float(x) for name, x in metrics.items()}
            self.checkpoints.write_state(folder, self.state)
            if validated:
                self._record(metrics)

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the model's state."""
        rest = {} if self.unvalidated is None else {UNVALIDATED: self.unvalidated}
        return {"step": self.step, DATA: self.train.fingerprint, **rest}

    def _record(self, metrics: Metrics) -> None:
        self.log.append(self.step, metrics)
        self.trackers.log(self.step, metrics)
        shown = ("train/loss", "train/accuracy", "val/loss", "val/accuracy", "timing_s/step", "timing_s/testing")
        known = [f"{name} {metrics[name]:.4g}" for name in shown if name in metrics]
        self.console.status(f"step {self.step}/{self.config.run.steps}  " + "  ".join(known))
        self.remote.tell()
