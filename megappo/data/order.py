"""Which prompts come next: a pure function of the seed and the number of prompts taken so far.

That number is all that has to be remembered, so a run resumed in mid-epoch goes on with exactly the prompts that it
would have taken had it never stopped.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True)
class PromptOrder:
    """An endless stream of epochs.

    Every epoch holds each prompt exactly once; with `shuffle` it is a permutation drawn from `(seed, epoch)`, else the
    order of the files.

    Raises:
        ValueError: a size that is not positive, or a negative seed.
    """

    num_prompts: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.num_prompts < 1:
            raise ValueError(f"num_prompts is {self.num_prompts}; it must be at least 1")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; it must not be negative")

    def take(self, start: int, count: int) -> np.ndarray:
        """Prompt indices, int64 `[count]`, from position `start` of the stream (the first is 0), over epochs' ends.

        Raises:
            ValueError: a position before the first, or fewer than one prompt.
        """
        if start < 0 or count < 1:
            raise ValueError(f"start is {start}, count is {count}; they must be at least 0 and 1")
        stop = start + count
        epochs = range(start // self.num_prompts, (stop - 1) // self.num_prompts + 1)
        first = epochs[0] * self.num_prompts
        stream = np.concatenate([self._permutation(epoch) for epoch in epochs])
        return stream[start - first : stop - first]

    def epoch(self, position: int) -> int:
        """The epoch (the first is 0) of a position of the stream."""
        return position // self.num_prompts

    def _permutation(self, epoch: int) -> np.ndarray:
        return _permutation(self.num_prompts, self.seed, epoch) if self.shuffle else np.arange(self.num_prompts)


@lru_cache(maxsize=2)
def _permutation(num_prompts: int, seed: int, epoch: int) -> np.ndarray:
    permutation = np.random.default_rng([seed, epoch]).permutation(num_prompts)
    permutation.setflags(write=False)  # it is shared by the cache
    return permutation
