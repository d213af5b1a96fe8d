"""The PPO loop: generate, score, assign credit, update critic and actor, give the engines the new weights.

Schulman et al. (arXiv:1707.06347) on language models as in Ziegler et al. (arXiv:1909.08593). All models live in worker
processes; what the driver holds of a batch are references and a few per-token columns.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megappo.ahead import Ahead
from megappo.checkpoints import DATA, UNVALIDATED
from megappo.cluster.cluster import Cluster
from megappo.cluster.dataflow import Batch, put_table
from megappo.cluster.forks import Forks
from megappo.collect import Collected, Collector, baseline_column
from megappo.config import Config
from megappo.credit import Credit, assign_credit
from megappo.data.loss_mask import LOSS_MASK
from megappo.data.prompts import PromptSet
from megappo.data.requests import make_requests
from megappo.layout.flops import peak_tflops
from megappo.layout.timeline import ADVANTAGES
from megappo.oversight import Oversight, StoppedByGuard, Verdict
from megappo.ppo.balance import mini_batches
from megappo.ppo.kl import KLController
from megappo.ppo.schedule import learning_rates
from megappo.replay import Replayer
from megappo.report.predicted import Prediction
from megappo.report.speed import speed_metrics, speed_workers
from megappo.report.step_metrics import Metrics, time_metrics
from megappo.restarts import with_restarts
from megappo.rewards.scale import Moments, scaled
from megappo.run import Run
from megappo.steps import is_due, take_steps
from megappo.stop_request import StopRequest, stop_request
from megappo.streamed import Streamed
from megappo.workers.objectives import ActorObjective, CriticObjective
from megappo.workers.settings import Sampling

AHEAD = "ahead"
"""Folder of a checkpoint: batches that were generated before their step."""


def train(config: Config, forks: Forks | None = None) -> bool:
    """Train as configured, from the beginning or from the run's last complete checkpoint.

    Args:
        forks: what to fork processes from.

    Returns:
        Whether all steps are done, and validated; if not, SIGUSR1 asked for an early end, and a checkpoint holds what
        is done.

    Raises:
        DataError, RewardError, ModelError, PoolError, StackError, DeviceTooSmall, WorkerFailed, WeightMismatch,
            NoProgress, StoppedByGuard, UnknownMetric: with words for the user.
    """
    with stop_request() as stop, Run(config) as run:
        if not run.is_finished:
            run.check_rewards()
            if not with_restarts(lambda: _train_until_stopped(config, run, stop, forks), run, config.run.restarts):
                return False
        run.finish()
    return True


def _train_until_stopped(config: Config, run: Run, stop: StopRequest, forks: Forks | None = None) -> bool:
    """Train in processes that are started here, and end here however it ends."""
    if run.is_finished:  # the last one was lost after its last checkpoint
        return True
    with Cluster(config, run.data_sources, run.console.status, forks) as cluster:
        trainer = Trainer(config, run, cluster, stop)
        trainer.resume()
        if trainer.step == 0 and config.run.validate_before and not stop.asked:  # else no step comes after it
            run.log(0, trainer.validate(check=True))
        # For want of time the last step may be done, but not validated.
        if take_steps(trainer, config.run.steps, stop) and run.is_finished:
            return True
        run.stopped(trainer.step)
        return False


class Trainer:
    """State of the loop: the step, the place in the data, the KL controller and what the guards remember.

    All else is in the workers.
    """

    def __init__(self, config: Config, run: Run, cluster: Cluster, stop: StopRequest | None = None) -> None:
        torch.set_num_threads(1)  # a step's tensors here are small: threads would wait for each other, not compute
        self.config, self.run, self.cluster = config, run, cluster
        self.stop = stop or StopRequest()
        self.step = self.position = 0
        self.prediction = Prediction(config, cluster.device_name)
        kl = config.ppo.kl
        self.controller = KLController(kl.coef, kl.target, kl.horizon)
        self.oversight = Oversight(config)
        self.moments = Moments()
        self.collector = batch_source(config, cluster, run.train_prompts)
        rollout = config.roles.rollout
        self.validation_sampling = Sampling(
            rollout.validation_temperature,
            rollout.validation_top_p,
            rollout.validation_top_k,
            config.data.max_response,
        )

    def train_step(self) -> bool:
        """One step, with validation and checkpoint where they are due; in the end it is in the log.

        Returns whether a checkpoint holds it.
        """
        config, began = self.config, time.time()
        self.cluster.calls.spans.clear()

        collected = self.collector.collect(self.step, self.position)
        self.cluster.rest_engines()
        batch = self.evaluate(collected)
        evaluated = time.time()
        given = {LOSS_MASK, "token_scores"} & batch.columns
        rows = batch.read("logprobs", "score", "failed", *self.further_columns, *given)
        rows, self.moments = scaled(rows, config.roles.reward, self.moments)
        guarded = replace(self.controller, coef=self.controller.coef * self.oversight.guards.kl_factor)
        credit = assign_credit(rows, config.ppo, guarded, max_response=config.data.max_response)
        batch = replace(batch.with_columns([put_table(credit.table)]), loss_tokens=credit.loss_tokens)
        credited = time.time()
        trained = self.update(batch)
        kept = self.run.keep(self.step + 1, batch)
        self.collector.settle()
        sync_bytes = self.cluster.sync_weights(version=self.step + 1)

        metrics = {
            **trained,
            "perf/sync_bytes": sync_bytes,
            **kept,
            **collected.metrics,
            **self.credit_metrics(credit, guarded.coef),
            "training/global_step": self.step + 1,
            "training/epoch": self.collector.order.epoch(self.position),
        }
        self.controller = self.controller.updated(credit.mean_kl, len(batch.ids))
        self.step, self.position = self.step + 1, collected.position
        metrics["timing_s/adv"] = credited - evaluated
        metrics |= self.performance(batch, collected.drawn, time.time() - began)
        return self.conclude(metrics)

    def conclude(self, metrics: Metrics) -> bool:
        """Validate, let the guards act, write a checkpoint, each where it is due; and log the step.

        Where a signal has asked for an end, the time for a checkpoint may be short: it is written at once, and the
        validation comes when the run goes on (:meth:`catch_up`).

        Returns whether a checkpoint holds the step.

        Raises:
            StoppedByGuard, UnknownMetric: with words for the user.
        """
        run = self.config.run
        if is_due(self.step, run.validate_every, run.steps):
            if self.stop.asked and self.run.watched_prompts:
                self.save(metrics, validated=False)
                return True
            metrics |= self.validate()
        verdict = self.judge(metrics)
        asked = self.stop.asked or bool(verdict.stop) or verdict.improved
        if saved := asked or is_due(self.step, run.checkpoint_every, run.steps):
            self.save(metrics)
        else:
            self.run.log(self.step, metrics)
        self._end_if_told(verdict)
        return saved

    def catch_up(self, checkpoint: Path, metrics: Metrics) -> None:
        """Validate and log the step of a checkpoint that had to be written before.

        Args:
            metrics: of the step, as far as it was done.

        Raises:
            StoppedByGuard, UnknownMetric: with words for the user.
        """
        metrics |= self.validate()
        verdict = self.judge(metrics)
        self.run.log(self.step, metrics)
        self.run.checkpoints.amend(checkpoint, self.state, self.best_step)
        self._end_if_told(verdict)

    def judge(self, metrics: Metrics) -> Verdict:
        """What the guards conclude from a step's metrics, to which theirs are added."""
        verdict = self.oversight.judge(self.step, metrics)
        metrics |= verdict.metrics
        for message in verdict.messages:
            self.run.console.warn(message)
        return verdict

    def _end_if_told(self, verdict: Verdict) -> None:
        if verdict.stop and self.step < self.config.run.steps:
            raise StoppedByGuard(
                f"{verdict.stop[0]}: stopped after step {self.step}, whose checkpoint is written. Look into it, change "
                "the configuration, and the same command goes on from there"
            )

    def performance(self, batch: Batch, drawn: Sequence[int], step_s: float) -> Metrics:
        """Times, rates and what was predicted, of a step that took this long.

        Args:
            drawn: see :attr:`megappo.collect.Collected.drawn`.
        """
        config, trained, judged = self.config, batch.trained_tokens > 0, 1.0
        if "reward" in config.roles.megatron:
            sources = batch.read("data_source").column("data_source").to_pylist()
            judged = float(self.cluster.reward.judged(sources).mean())
        share = sum(drawn) / len(batch.ids)
        times = time_metrics(self.cluster.calls.spans, step_s)
        done = {name.removeprefix("timing_s/") for name in times} | {ADVANTAGES}
        out = {**times, "timing_s/step": step_s, "perf/time_per_step": step_s}
        out |= speed_metrics(
            speed_workers(config),
            out,
            batch.tokens,
            batch.response_tokens,
            trained=trained,
            passes=config.ppo.passes,
            peak_tflops=config.run.peak_tflops or peak_tflops(self.cluster.device_name),
            shares={"gen": share, "reward_model": share * judged},
        )
        devices = sum(pool.devices for pool in config.pools.values())
        out["perf/throughput"] = float(batch.tokens.sum() + len(batch.ids)) / step_s / devices
        return out | self.prediction.metrics(
            batch.tokens + 1,  # the last one, which predicts nothing
            batch.response_tokens,
            trained=trained,
            rounds=drawn,
            judged=judged,
            done=done,
        )

    @property
    def further_columns(self) -> tuple[str, ...]:
        """What credit assignment reads beside the essentials, as configured."""
        values = ("values",) if self.cluster.critic is not None else ()
        groups = ("prompt_index",) if self.config.ppo.compares_responses else ()
        cut = ("finish_reason",) if self.config.ppo.mask_truncated else ()
        reference = ("ref_logprobs",) if self.cluster.reference is not None else ()
        correction = ("rollout_logprobs",) if self.config.ppo.correction_level != "off" else ()
        return (*values, *groups, *self.config.ppo.greedy_columns, *reference, *correction, *cut)

    def credit_metrics(self, credit: Credit, coef: float) -> Metrics:
        """What the rewards were made of."""
        overlong = {} if self.config.ppo.overlong is None else {"reward/overlong_penalty/mean": credit.mean_overlong}
        return {
            "actor/reward_kl_penalty": credit.mean_token_kl,
            "actor/reward_kl_penalty_coeff": coef,
            **overlong,
        }

    def evaluate(self, collected: Collected) -> Batch:
        """Scores, log-probabilities of actor and reference, and values: all pools at the same time."""
        cluster, temperature = self.cluster, self.config.roles.rollout.temperature
        batch, greedy = collected.batch, collected.greedy
        pending = [cluster.actor.score("logprobs", batch, column="logprobs", temperature=temperature)]
        if not collected.scored:
            pending.append(cluster.reward.score(batch))
        if cluster.critic is not None:
            pending.append(cluster.critic.score("values", batch))
        if cluster.reference is not None:
            options: dict[str, Any] = {"column": "ref_logprobs", "temperature": temperature}
            pending.append(cluster.reference.score("logprobs", batch, **options))
        if greedy is None:
            return batch.with_columns(*cluster.gather(*pending))
        *columns, scores = cluster.gather(*pending, cluster.reward.score(greedy))
        return batch.with_columns(*columns, baseline_column(batch.ids, greedy.with_columns(scores)))

    def update(self, batch: Batch) -> Metrics:
        """All passes over mini-batches for critic and actor, which train at the same time."""
        ppo, guards = self.config.ppo, self.oversight.guards
        guarded = replace(ppo, kl=replace(ppo.kl, loss_coef=ppo.kl.loss_coef * guards.kl_factor))
        temperature = self.config.roles.rollout.temperature
        objectives = {"critic": CriticObjective(ppo), "actor": ActorObjective(guarded, temperature)}
        now = learning_rates(ppo, self.step, self.config.run.steps)
        rates = {role: guards.rate_factor * rate for role, rate in now.items()}
        pending = [
            self.cluster.trained[role].update(batch, self._steps(batch, ppo.passes(role)), objectives[role], rate)
            for role, rate in rates.items()
            if batch.trained_tokens.any()  # else all responses were cut
        ]
        out: Metrics = {f"{role}/lr": rate for role, rate in rates.items()}
        for metrics in self.cluster.gather(*pending):
            out |= metrics
        return out

    def _steps(self, batch: Batch, passes: int) -> list[np.ndarray]:
        """The rows of each optimizer step that have a token that trains; every pass has a shuffle of its own."""
        seed, size = self.config.run.seed, self.config.ppo.mini_batch
        shuffles = [f"{seed}/{self.step}/{number}" for number in range(passes)]
        drawn = [np.array(rows) for shuffle in shuffles for rows in mini_batches(len(batch.ids), size, shuffle)]
        trained = [rows[batch.trained_tokens[rows] > 0] for rows in drawn]
        return [rows for rows in trained if len(rows)]

    def validate(self, *, check: bool = False) -> Metrics:
        """Score the validation prompts, and the canary's, with the current weights.

        Args:
            check: refuse guards of metrics that are not among them.
        """
        began, out = time.time(), Metrics()
        for kind, prompts in self.run.watched_prompts.items():
            out |= self._validate(kind, prompts)
        if check:
            self.oversight.check(out)
        return {**out, "timing_s/testing": time.time() - began} if out else out

    def _validate(self, kind: str, prompts: PromptSet) -> Metrics:
        samples = self.config.roles.rollout.validation_samples
        requests = make_requests(prompts, np.arange(len(prompts)), samples)
        batch = self.cluster.generate(
            put_table(requests.table),
            requests.prompt_tokens,
            self.validation_sampling,
            samples=samples,
            seed=(self.config.run.seed,),
            version=self.step,
        )
        with self.cluster.room_for_rewards(self.step):
            batch = batch.with_columns(*self.cluster.gather(self.cluster.reward.score(batch)))
        return self.run.keep_validation(self.step, batch, kind)

    def save(self, metrics: Metrics, *, validated: bool = True) -> None:
        """Write a checkpoint, complete or not at all, and the step's line in the log.

        The line comes before the checkpoint gets its name: a run killed in between does the step again, and one killed
        later has both.

        Args:
            validated: whether the step is done; if not, the checkpoint keeps its metrics, and no line is written.
        """
        began, cluster = time.time(), self.cluster
        with cluster.everything_loaded(self.step), self.run.checkpoints.writing(self.step, self.best_step) as folder:
            cluster.gather(*(group.save(str(folder / role)) for role, group in cluster.trained.items()))
            self.collector.save(folder / AHEAD)
            metrics = {**metrics, "timing_s/save_checkpoint": time.time() - began}
            numbers = {name: value if isinstance(value, int) else float(value) for name, value in metrics.items()}
            rest = {} if validated else {UNVALIDATED: numbers}
            self.run.checkpoints.write_state(folder, {**self.state, **rest})
            if validated:
                self.run.log(self.step, metrics)

    @property
    def best_step(self) -> int | None:
        """The best step so far, if it is looked for and was seen."""
        return self.oversight.best.step if self.oversight.best else None

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the workers' states."""
        return {
            "step": self.step,
            "position": self.position,
            DATA: self.run.data_fingerprint,
            "kl_coef": self.controller.coef,
            "reward_moments": asdict(self.moments),
            **self.oversight.state,
        }

    def resume(self) -> None:
        """Go on from the last complete checkpoint, if there is one; and fill the engines with the actor's weights."""
        latest, unvalidated = self.run.checkpoints.latest(), None
        if latest is not None:
            state, cluster = self.run.checkpoints.read_state(latest, self.state.keys() - {DATA}), self.cluster
            cluster.gather(*(group.load(str(latest / role)) for role, group in cluster.trained.items()))
            self.collector.load(latest / AHEAD)
            self.step, self.position = state["step"], state["position"]
            self.oversight.restore(state)
            if self.controller.target is not None:  # a fixed coefficient is the configuration's, also if it changed
                self.controller = replace(self.controller, coef=state["kl_coef"])
            self.moments = Moments(**state["reward_moments"])
            unvalidated = state.get(UNVALIDATED)
        self.run.start_log(self.step if latest is not None else None, validated=unvalidated is None)
        self.cluster.sync_weights(version=self.step)
        if latest is not None and unvalidated is not None and not self.stop.asked:
            self.catch_up(latest, unvalidated)


def batch_source(config: Config, cluster: Cluster, prompts: PromptSet) -> Ahead | Streamed | Replayer:
    """Where the batches of the steps come from, and when."""
    if config.data.replay:
        return Replayer(config, len(prompts))
    if config.ppo.streams:
        return Streamed(config, cluster, prompts)
    return Ahead(config, Collector(config, cluster, prompts))
