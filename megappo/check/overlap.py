"""Whether generation and training can overlap as asked."""

from __future__ import annotations

from collections.abc import Iterator

from megappo.check.findings import Advice
from megappo.config import Config


def overlap_findings(config: Config) -> Iterator[str]:
    """What ``ppo.staleness`` does not go together with."""
    staleness, rollout = config.ppo.staleness, config.roles.rollout
    if not staleness:
        return
    sharing = [name for name, role in config.roles.megatron.items() if role.pool == rollout.pool]
    if sharing:
        yield (
            f"ppo.staleness: {staleness} has the engines generate while others work, and {' and '.join(sharing)} "
            f"{'takes' if len(sharing) == 1 else 'take'} turns with them in the pool {rollout.pool}: give "
            "roles.rollout.pool a pool of its own, or set 0"
        )
    if config.ppo.streams and config.ppo.dynamic_sampling is not None:
        yield (
            f"ppo.dynamic_sampling: which prompts it takes is known only when others are scored, while ppo.staleness "
            f"{staleness} has several batches drawn at a time: set null, or staleness 1"
        )
    if config.ppo.streams and config.ppo.needs_greedy:
        yield (
            f"ppo.estimator: {config.ppo.estimator} takes greedy responses of one version of the weights, while "
            f"ppo.staleness {staleness} draws across several: choose another, or staleness 1"
        )
    if config.ppo.correction_level == "off":
        yield Advice(
            f"ppo.correction.level: off, with ppo.staleness {staleness}, takes responses of older weights for those of "
            "the newest, so that training is biased: leave it out, or set token"
        )
