"""Dynamic sampling: train on prompts whose responses differ in reward, and sample more where too few do.

DAPO, Yu et al. (arXiv:2503.14476), section 3.2: a group whose responses are all right or all wrong has no advantage, so
that the gradient of a batch shrinks with every such group. They are left out (the constraint of equation 11), and
further prompts are sampled until the batch is full.
"""

from __future__ import annotations

import math

import numpy as np


def informative(scores_gs: np.ndarray) -> np.ndarray:
    """bool [groups]: whether the scores of a group's samples differ. `scores_gs`: float [groups, samples]."""
    return scores_gs.max(axis=1) != scores_gs.min(axis=1)


def next_round(wanted: int, kept: int, seen: int) -> int:
    """Prompts of the next round: as many as are missing, more by the share that was kept so far, `wanted` at most.

    Args:
        wanted: groups of a whole batch.
        kept: groups that were kept so far, < wanted.
        seen: groups that were sampled so far, >= kept.
    """
    missing = wanted - kept
    return min(math.ceil(missing * seen / kept), wanted) if kept else wanted
