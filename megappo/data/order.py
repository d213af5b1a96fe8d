"""Which prompts a training step takes: a pure function of the seed and the step's index.

Nothing is remembered between steps, so a run resumed in mid-epoch goes on with exactly the prompts that it would have
taken had it never stopped.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True)
class PromptOrder:
    """An endless stream of epochs, cut into steps of `per_step` prompts.

    Every epoch holds each prompt exactly once; with `shuffle` it is a permutation drawn from `(seed, epoch)`, else the
    order of the files. A step may straddle two epochs, or several where `per_step` exceeds `num_prompts`.

    Raises:
        ValueError: a size that is not positive, or a negative seed.
    """

    num_prompts: int
    per_step: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        for name in ("num_prompts", "per_step"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; it must not be negative")

    def step(self, step_index: int) -> np.ndarray:
        """Prompt indices, int64 `[per_step]`, of step `step_index` (the first is 0)."""
        start = self._start(step_index)
        stop = start + self.per_step
        epochs = range(start // self.num_prompts, (stop - 1) // self.num_prompts + 1)
        first = epochs[0] * self.num_prompts
        stream = np.concatenate([self._permutation(epoch) for epoch in epochs])
        return stream[start - first : stop - first]

    def epoch(self, step_index: int) -> int:
        """The epoch (the first is 0) of the first prompt of step `step_index`."""
        return self._start(step_index) // self.num_prompts

    def _start(self, step_index: int) -> int:
        if step_index < 0:
            raise ValueError(f"step_index is {step_index}; it must not be negative")
        return step_index * self.per_step

    def _permutation(self, epoch: int) -> np.ndarray:
        return _permutation(self.num_prompts, self.seed, epoch) if self.shuffle else np.arange(self.num_prompts)


@lru_cache(maxsize=2)
def _permutation(num_prompts: int, seed: int, epoch: int) -> np.ndarray:
    permutation = np.random.default_rng([seed, epoch]).permutation(num_prompts)
    permutation.setflags(write=False)  # it is shared by the cache
    return permutation
