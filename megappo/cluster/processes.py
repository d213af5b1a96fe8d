"""The life of processes on Ray: devices are reserved, processes start on them, and all end together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TypeVar

import ray
from ray.util.placement_group import remove_placement_group

from megappo.cluster.calls import Calls
from megappo.cluster.environment import has_own_ray
from megappo.cluster.forks import Forks, Pythons
from megappo.cluster.pools import Pool, end_on_sigterm, reserve_pools, start_ray
from megappo.cluster.watch import Address, wait_until_gone
from megappo.config import Devices

Own = TypeVar("Own", bound="Processes")

GONE_S = 60.0
"""How long the processes of a run may take to leave a Ray that goes on without them."""


class Processes:
    """Reserved pools and the processes that subclasses start on them, as a context manager.

    Attributes:
        calls: waits for what processes were asked.
        pools: all of the configuration.
        pythons: commands that processes start by in place of Python.
        started: where processes on the pools are; subclasses, which start them, add to it.
    """

    pools: Mapping[str, Pool]

    def __init__(self, config: Devices, forks: Forks | None = None) -> None:
        """Connect to the Ray that ``RAY_ADDRESS`` names, or start one on this machine, and reserve the pools.

        Args:
            forks: what to fork processes from.

        Raises:
            PoolError: the cluster lacks devices.
        """
        self.calls = Calls(config.run.timeout_s, config.run.heartbeat_s)
        self.pythons = Pythons() if forks is None else forks.pythons()
        self.started: list[Address] = []
        self._ends = ExitStack()
        with self._or_end():
            own = has_own_ray()
            self._ends.callback(ray.shutdown)
            start_ray(config)
            end_on_sigterm()
            self.pools = reserve_pools(config, min(config.run.timeout_s, 600.0), fixed=own)
            if not own:  # one's own ends with all that is on it
                self._ends.callback(wait_until_gone, self.started, GONE_S)
            for pool in self.pools.values():
                self._ends.callback(remove_placement_group, pool.reservation)  # kills the processes in it

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all processes."""
        self._ends.close()

    @contextmanager
    def _or_end(self) -> Iterator[None]:
        """What is started here ends if not all of it can be."""
        try:
            yield
        except BaseException:
            self.close()
            raise
