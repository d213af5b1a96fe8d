"""What a step should have taken, beside what it took: ``perf/predicted_*`` in the log."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from megappo.config import Config
from megappo.layout.devices import known_profile
from megappo.layout.memory import GIB
from megappo.layout.timeline import Phase
from megappo.plan.estimate import UPDATES, Workload, estimate, on_nodes
from megappo.plan.memory import role_peaks
from megappo.plan.sync import weight_sync


class Prediction:
    """Predictions for one run, from its configuration and the kind of its devices; none where that is not known."""

    def __init__(self, config: Config, device_name: str) -> None:
        device = known_profile(device_name)
        self._config, self._device = config, device and on_nodes(config, device)

    def metrics(
        self,
        tokens: np.ndarray,
        response_tokens: np.ndarray,
        *,
        trained: np.ndarray | None = None,
        rounds: Sequence[int] = (),
        judged: float = 1.0,
        done: Collection[str] | None = None,
    ) -> dict[str, float]:
        """``perf/predicted_s/<phase>`` and ``perf/predicted_s/step``, and ``perf/predicted_memory_gb/<role>``.

        The memory compares with ``perf/max_memory_allocated_gb/<role>``: all that torch allocates in its update.

        Args:
            tokens, response_tokens: of each row, as they came out; prompt and response, and the response alone.
            trained: whether each row is in the updates; all are by default.
            rounds, judged: what was drawn, and judged, as :class:`megappo.plan.estimate.Workload` has it.
            done: phases that there were; all of the configuration's by default.
        """
        if self._device is None or not len(tokens):
            return {}
        work = replace(_workload(tokens, response_tokens), rounds=tuple(rounds), judged=judged)
        if trained is not None and trained.any():
            work = replace(work, updated=_workload(tokens[trained], response_tokens[trained]))
        step = estimate(self._config, self._device, work, self._sync, done=done)
        out = {f"perf/predicted_s/{name}": phase.seconds for name, phase in step.phases.items()}
        updated, mini_batch = work.in_updates(self._config.ppo.mini_batch)
        config = replace(self._config, ppo=replace(self._config.ppo, mini_batch=mini_batch))
        peaks = role_peaks(config, self._device, updated.prompt + updated.response - 1)  # the last predicts nothing
        memory = {
            f"perf/predicted_memory_gb/{role}": size / GIB
            for role, size in peaks.items()
            if UPDATES[role] in step.phases
        }
        return {**out, "perf/predicted_s/step": step.seconds, **memory}

    @cached_property
    def _sync(self) -> Phase:
        assert self._device is not None
        return weight_sync(self._config, self._device)[1]


def _workload(tokens: np.ndarray, response_tokens: np.ndarray) -> Workload:
    response = float(response_tokens.mean())
    return Workload(len(tokens), float(tokens.mean()) - response, response, float(response_tokens.max()))
