"""The processes of training on given responses: one model on one pool."""

from __future__ import annotations

from collections.abc import Callable

from megappo.cluster.groups import MegatronGroup, layouts
from megappo.cluster.processes import Processes
from megappo.cluster.start import Starter
from megappo.config import SCALAR_HEAD, SupervisedConfig
from megappo.fit_given import check_training_fit
from megappo.stack import MEGATRON
from megappo.workers.settings import RoleSettings


class TrainingCluster(Processes):
    """A trained role on its pool, as a context manager.

    Attributes:
        model: the role's group.
    """

    model: MegatronGroup

    def __init__(self, config: SupervisedConfig, role: str, status: Callable[[str], None]) -> None:
        """Start everything.

        Args:
            role: ``actor`` (a language model) or ``reward`` (a scalar head).
            status: told what is going on, one line at a time.

        Raises:
            PoolError, StackError, DeviceTooSmall, WorkerFailed: as of :class:`megappo.cluster.cluster.Cluster`.
        """
        super().__init__(config)
        with self._or_end():
            self._start(config, role, status)

    def _start(self, config: SupervisedConfig, role: str, status: Callable[[str], None]) -> None:
        start = Starter(config, self.calls, self.pools, self.started, self.python)
        started = start.pool(role, self.pools[config.role.pool])
        status(f"starting {len(started)} processes")
        (members,) = start.located(started)
        start.check_stacks((members, MEGATRON[config.run.device]))
        devices = start.join({role: members})[role]
        if config.run.device == "cuda":
            check_training_fit(config, role, devices)
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
