"""The learning rate as a function of the step alone, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

SCHEDULES = ("constant", "linear", "cosine")


def learning_rate(
    step: int, *, base: float, warmup_steps: int, total_steps: int, schedule: str, min_ratio: float = 0.0
) -> float:
    """The learning rate of update `step`, counted from 0.

    Linear warm-up first: base * (step + 1) / warmup_steps, so that the first update is not wasted on a rate of 0. Then,
    with p the share of the remaining steps already done:

    - constant: base
    - linear: base * (min_ratio + (1 - min_ratio) * (1 - p))
    - cosine: base * (min_ratio + (1 - min_ratio) * (1 + cos(pi p)) / 2), SGDR (arXiv:1608.03983), equation 5

    The floor base * min_ratio is reached at step total_steps, one past the last, and holds from there on.

    Args:
        step: >= 0.
        base: the peak.
        warmup_steps: >= 0; 0 for none.
        total_steps: updates of the whole run, warm-up included.
        schedule: "constant", "linear" or "cosine".
        min_ratio: the floor as a share of base, in [0, 1].

    Raises:
        ValueError: for an unknown schedule.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule is {schedule!r}; use one of {', '.join(SCHEDULES)}")
    if step < warmup_steps:
        return base * (step + 1) / warmup_steps
    if schedule == "constant":
        return base
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    height = 1 - progress if schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return base * (min_ratio + (1 - min_ratio) * height)
