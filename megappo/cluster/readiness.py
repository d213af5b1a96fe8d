"""Wait until every node of a job is alive in its Ray cluster: ``python -m megappo.cluster.readiness SECONDS NODE ...``.

Nodes are known by the custom resource that ``launch/slurm/node.sh`` gives them; ``RAY_ADDRESS`` names the cluster.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence

from megappo.cluster.node_names import node_resource


def late_nodes(wanted: Sequence[str], alive: Callable[[], Sequence[str]], timeout_s: float) -> list[str]:
    """Those of the wanted resources that are not there after ``timeout_s``; returns as soon as all are."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = set(alive())
        late = [name for name in wanted if node_resource(name) not in found]
        if not late or time.monotonic() > deadline:
            return late
        time.sleep(0.2)


def _resources_of_living_nodes() -> list[str]:
    import ray

    return [resource for node in ray.nodes() if node["Alive"] for resource in node["Resources"]]


def main(timeout_s: float, wanted: Sequence[str]) -> int:
    """Exit status 1 if a node is missing; its name is on standard error."""
    import ray

    ray.init(log_to_driver=False, logging_level=logging.ERROR)
    late = late_nodes(wanted, _resources_of_living_nodes, timeout_s)
    ray.shutdown()
    if late:
        print(f"error: {len(late)} of {len(wanted)} nodes did not come: {', '.join(late)}", file=sys.stderr)
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
