"""The processes of training on given responses: one model on one pool."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import ray

from megappo.cluster.calls import Calls
from megappo.cluster.groups import MegatronGroup, layouts
from megappo.cluster.pools import Pool, end_on_sigterm, reserve_pools, start_ray
from megappo.cluster.start import Starter
from megappo.config import SCALAR_HEAD, SupervisedConfig
from megappo.stack import MEGATRON
from megappo.workers.settings import RoleSettings


class TrainingCluster:
    """A trained role on its pool, as a context manager.

    Attributes:
        model: the role's group.
        calls: waits for what it was asked.
    """

    model: MegatronGroup

    def __init__(self, config: SupervisedConfig, role: str, status: Callable[[str], None]) -> None:
        """Start everything.

        Args:
            role: ``actor`` (a language model) or ``reward`` (a scalar head).
            status: told what is going on, one line at a time.

        Raises:
            PoolError, StackError, WorkerFailed: as of :class:`megappo.cluster.cluster.Cluster`.
        """
        self.calls = Calls(config.run.timeout_s)
        self._owns_ray = False
        self._pool: Pool | None = None
        try:
            self._start(config, role, status)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> TrainingCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all processes."""
        if self._pool is not None:
            ray.util.remove_placement_group(self._pool.reservation)
        if self._owns_ray:
            ray.shutdown()

    def _start(self, config: SupervisedConfig, role: str, status: Callable[[str], None]) -> None:
        self._owns_ray = start_ray(config)
        end_on_sigterm()
        pools = reserve_pools(config, min(config.run.timeout_s, 600.0), fixed=self._owns_ray)
        self._pool = pools[config.role.pool]
        start = Starter(config, self.calls, pools)
        started = start.pool(role, self._pool)
        status(f"starting {len(started)} processes")
        (members,) = start.located(started)
        start.check_stacks((members, MEGATRON[config.run.device]))
        start.join({role: members})
        status("loading the model")
        layout = layouts({role: config.role}, config.pools)[role]
        self.model = MegatronGroup(members, self.calls, role, layout)
        settings = RoleSettings(
            folder=config.model_folder,
            layout=layout,
            dtype=config.run.dtype,
            micro_batch_tokens=config.role.micro_batch_tokens,
            scalar_head=role in SCALAR_HEAD,
            optimizer=config.optimizer,
            timeout_s=config.run.timeout_s,
            recompute=config.role.recompute,
            fp8=config.role.fp8,
            offload=config.role.offload,
            lora=config.role.lora,
            seed=config.run.seed,
        )
        self.calls.gather(self.model.build(settings))
