"""Environment variables that a submitted job gets from whoever submits it; ``launch/ray/submit.sh`` asks.

``python -m megappo.cluster.job_environment`` prints Ray's runtime environment. The driver has them then, and gives its
workers those that :data:`megappo.cluster.environment.FORWARDED` names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from megappo.cluster.environment import FORWARDED
from megappo.cluster.node_names import PIN_POOLS

NAMES = ("PYTHONPATH", "OMP_NUM_THREADS", PIN_POOLS)
TRACKERS = ("WANDB_", "MLFLOW_")
"""Beginnings of what trackers read, in the driver."""


def job_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Those of the variables that the job is to have."""
    wanted = (*FORWARDED, *TRACKERS)
    return {name: value for name, value in environment.items() if name in NAMES or name.startswith(wanted)}


if __name__ == "__main__":
    print(json.dumps({"env_vars": job_environment(os.environ)}))
