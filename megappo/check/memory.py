"""Whether everything fits into the devices, as far as it can be known without them."""

from __future__ import annotations

from collections.abc import Iterator

from megappo.check.findings import Advice
from megappo.config import Config
from megappo.plan.memory import fit_problems
from megappo.plan.profile import ProfileError, load_profile


def fit_findings(config: Config) -> Iterator[str]:
    """What does not fit into devices of ``run.device_profile``; of a configuration without errors.

    It is advice: only the run sees the devices that it gets, and then refuses what does not fit.
    """
    if config.run.device != "cuda":
        return
    try:
        device = load_profile(config.run.device_profile)
    except ProfileError as error:
        yield from (f"run.device_profile: {problem}" for problem in error.problems)
        return
    for problem in fit_problems(config, device):
        yield Advice(f"{problem} (planned for run.device_profile: {config.run.device_profile})")
