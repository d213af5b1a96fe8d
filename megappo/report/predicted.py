"""What a step should have taken, beside what it took: ``perf/predicted_*`` in the log."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from megappo.config import Config
from megappo.layout.devices import known_profile
from megappo.layout.memory import GIB
from megappo.layout.timeline import Phase
from megappo.plan.estimate import Workload, estimate, on_nodes
from megappo.plan.memory import role_peaks
from megappo.plan.sync import weight_sync


class Prediction:
    """Predictions for one run, from its configuration and the kind of its devices; none where that is not known."""

    def __init__(self, config: Config, device_name: str) -> None:
        device = known_profile(device_name)
        self._config, self._device = config, device and on_nodes(config, device)

    def metrics(self, tokens: np.ndarray, response_tokens: np.ndarray) -> dict[str, float]:
        """``perf/predicted_s/<phase>`` and ``perf/predicted_s/step``, and ``perf/predicted_memory_gb/<role>``.

        The memory compares with ``perf/max_memory_allocated_gb/<role>``: all that torch allocates in its update.

        Args:
            tokens, response_tokens: of each row, as they came out.
        """
        if self._device is None or not len(tokens):
            return {}
        response = float(response_tokens.mean())
        prompt = float(tokens.mean()) - response
        work = Workload(len(tokens), prompt, response, float(response_tokens.max()))
        step = estimate(self._config, self._device, work, self._sync)
        out = {f"perf/predicted_s/{name}": phase.seconds for name, phase in step.phases.items()}
        peaks = role_peaks(self._config, self._device, float(tokens.mean()) - 1)  # the last token predicts nothing
        memory = {f"perf/predicted_memory_gb/{role}": size / GIB for role, size in peaks.items()}
        return {**out, "perf/predicted_s/step": step.seconds, **memory}

    @cached_property
    def _sync(self) -> Phase:
        assert self._device is not None
        return weight_sync(self._config, self._device)[1]
