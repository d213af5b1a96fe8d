"""What a run concludes from its own metrics: guards that act, and which checkpoint is the best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megappo.checkpoints import Best
from megappo.config import Config
from megappo.metric_names import family, meant
from megappo.ppo.guards import GuardState, UnknownMetric, guard_metrics, judge


class StoppedByGuard(RuntimeError):
    """A guard has ended the run, after a checkpoint."""


@dataclass(frozen=True)
class Verdict:
    """On one step.

    Attributes:
        metrics: of the guards, to be logged with the step's.
        messages: of guards that acted.
        stop: those of them that end the run.
        improved: whether the step is the best so far, so that it is worth a checkpoint.
    """

    metrics: Mapping[str, float]
    messages: tuple[str, ...]
    stop: tuple[str, ...]
    improved: bool


class Oversight:
    """Attributes: ``guards``, the guards' state; ``best``, the best step so far, if it is looked for and was seen."""

    def __init__(self, config: Config) -> None:
        self._guards, self._keep_best = config.ppo.guards, config.run.keep_best
        self.guards = GuardState()
        self.best: Best | None = None

    def judge(self, step: int, metrics: Mapping[str, float]) -> Verdict:
        """Take a step's metrics into account.

        Raises:
            UnknownMetric: a metric that is watched is never logged.
        """
        self.check(metrics)
        judgement = judge(self._guards, metrics, self.guards)
        self.guards, before = judgement.state, self.best
        if self._keep_best is not None and self._keep_best.metric in metrics:
            self.best = Best(step, metrics[self._keep_best.metric]).better_of(before, self._keep_best.mode)
        logged = guard_metrics(self.guards) if self._guards else {}
        return Verdict(logged, judgement.messages, judgement.stop, improved=self.best != before)

    def check(self, metrics: Mapping[str, float]) -> None:
        """Refuse metrics that are watched and not logged, as soon as others of their family are.

        Raises:
            UnknownMetric: with the key and close matches.
        """
        judge(self._guards, metrics, self.guards)
        if self._keep_best is not None and self.best is None:
            wanted = self._keep_best.metric
            logged = [name for name in metrics if family(name) == family(wanted)]
            if logged and wanted not in logged:
                raise UnknownMetric(f"run.keep_best.metric: {wanted} is not logged{meant(wanted, logged)}")

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"guards": self.guards.to_dict(), "best": None if self.best is None else asdict(self.best)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from :attr:`state`; guards and metrics that are not configured any more are forgotten."""
        self.guards = GuardState.from_dict(state["guards"], self._guards)
        if state["best"] is not None and self._keep_best is not None:
            self.best = Best(**state["best"])
