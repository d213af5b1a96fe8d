"""Guard rails: limits on logged metrics, and what happens beyond them; and which checkpoint is the best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megappo.strict_yaml import key

GuardAction = Literal["warn", "lower_lr", "raise_kl", "stop"]


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    metric: str = key("name of a logged metric")
    above: float | None = key("largest value that is all right; null: any", None)
    below: float | None = key("smallest value that is all right; null: any", None)
    for_steps: int = key("steps in a row beyond a limit before it acts, and before it acts again", 1, at_least=1)
    action: GuardAction = key(
        "say so, multiply all learning rates by factor, divide the KL coefficients by factor, or end the run after a "
        "checkpoint",
        "warn",
    )
    factor: float = key("what lower_lr multiplies by, and raise_kl divides by", 0.5, above=0, below=1)


@dataclass(frozen=True, kw_only=True)
class KeepBestConfig:
    """A checkpoint of the best step by a validation metric, beside the latest ones."""

    metric: str = key("name of a metric of the validation or the canary")
    mode: Literal["max", "min"] = key("whether more or less is better", "max")
