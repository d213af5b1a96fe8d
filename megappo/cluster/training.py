"""The processes of training on given responses: one model on one pool."""

from __future__ import annotations

from collections.abc import Callable

from megappo.cluster.forks import Forks
from megappo.cluster.groups import MegatronGroup, megatron_groups
from megappo.cluster.processes import Processes
from megappo.cluster.start import Starter
from megappo.config import SupervisedConfig
from megappo.fit.given import check_training_fit
from megappo.stack import MEGATRON


class TrainingCluster(Processes):
    """A trained role on its pool, as a context manager.

    Attributes:
        model: the role's group.
    """

    model: MegatronGroup

    def __init__(
        self, config: SupervisedConfig, role: str, status: Callable[[str], None], forks: Forks | None = None
    ) -> None:
        """Start everything.

        Args:
            role: ``actor`` (a language model) or ``reward`` (a scalar head).
            status: told what is going on, one line at a time.
            forks: what to fork processes from.

        Raises:
            PoolError, StackError, DeviceTooSmall, WorkerFailed: as of :class:`megappo.cluster.cluster.Cluster`.
        """
        super().__init__(config, forks)
        with self._or_end():
            self._start(config, role, status)

    def _start(self, config: SupervisedConfig, role: str, status: Callable[[str], None]) -> None:
        start = Starter(config, self.calls, self.pools, self.started, self.pythons)
        started = start.pool(role, self.pools[config.role.pool])
        status(f"starting {len(started)} processes")
        (members,) = start.located(started)
        start.check_stacks((members, MEGATRON[config.run.device]))
        devices = start.join({role: members})[role]
        if config.run.device == "cuda":
            check_training_fit(config, role, devices)
        status("loading the model")
        groups = megatron_groups({role: config.role}, config.pools, {config.role.pool: members}, self.calls)
        self.model = groups[role]
        self.calls.gather(self.model.build(config.role, config.model_folder, config.run, config.optimizer))
