"""All processes of a run: started, connected and ended together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from megappo.cluster.calls import Pending, WorkerLost
from megappo.cluster.dataflow import Batch, TableRef
from megappo.cluster.forks import Forks
from megappo.cluster.groups import Group, MegatronGroup, RolloutGroup, megatron_groups
from megappo.cluster.processes import Processes
from megappo.cluster.rewards import RewardGroup
from megappo.cluster.serving import Flight, Serving
from megappo.cluster.start import RunStarter
from megappo.cluster.streaming import Streaming
from megappo.cluster.weights import WeightSync
from megappo.config import Config
from megappo.fit.devices import check_fit
from megappo.fit.host import check_nodes
from megappo.stack import MEGATRON, ROLLOUT
from megappo.workers.settings import EngineSettings, Sampling


class Cluster(Processes):
    """The worker groups of a run, as a context manager.

    Attributes:
        actor, critic, reference, reward: the groups; ``critic`` is ``None`` where advantages need no values,
            ``reference`` where no KL term is in use.
        streaming: the engines, where they draw on while others work.
        device_name: of the Megatron processes' devices, as CUDA names it; "cpu" without.
    """

    actor: MegatronGroup
    critic: MegatronGroup | None
    reference: MegatronGroup | None
    reward: RewardGroup
    streaming: Streaming
    device_name: str

    def __init__(
        self,
        config: Config,
        data_sources: Sequence[str],
        status: Callable[[str], None],
        forks: Forks | None = None,
    ) -> None:
        """Start everything.

        Args:
            data_sources: all that occur in the data; each must have a reward function.
            status: told what is going on, one line at a time.
            forks: what to fork processes from.

        Raises:
            PoolError: the cluster lacks devices.
            StackError: a node lacks a package, or has it in a version that does not work.
            DeviceTooSmall: a pool's devices lack memory.
            WorkerFailed: a worker could not start.
            WeightMismatch: weights would go to wrong places.
        """
        super().__init__(config, forks)
        self.config = config
        with self._or_end():
            self._start(data_sources, status)

    def gather(self, *pending: Pending[Any]) -> list[Any]:
        """See :meth:`Calls.gather`; engines that generate meanwhile may be lost as :class:`Serving` allows."""
        while True:
            try:
                return self.calls.gather(*pending)
            except WorkerLost as loss:
                self._serving.survive(loss)

    @property
    def trained(self) -> dict[str, MegatronGroup]:
        """The roles that learn."""
        return {**({} if self.critic is None else {"critic": self.critic}), "actor": self.actor}

    def rest_engines(self) -> None:
        """See :meth:`WeightSync.rest`."""
        self._weights.rest()

    def everything_loaded(self, version: int) -> AbstractContextManager[None]:
        """See :meth:`WeightSync.everything_loaded`."""
        return self._weights.everything_loaded(version)

    def room_for_rewards(self, version: int) -> AbstractContextManager[None]:
        """Engines give way in here to a reward model that shares their devices.

        Args:
            version: of the actor's weights, which the engines get again afterwards.
        """
        shared = self.reward.model is not None and self.config.roles.reward.pool == self.config.roles.rollout.pool
        return self._weights.engines_resting(version) if shared else nullcontext()

    def sync_weights(self, version: int) -> int:
        """See :meth:`WeightSync.sync`."""
        return self._serving.sync_weights(version)

    @property
    def rollout(self) -> RolloutGroup:
        """The engines."""
        return self._serving.group

    def generate(self, requests: TableRef, prompt_tokens: np.ndarray, sampling: Sampling, **options: Any) -> Batch:
        """Sample responses; see :meth:`RolloutGroup.generation`."""
        return self.finish(self.begin(requests, prompt_tokens, sampling, **options))

    def begin(
        self, requests: TableRef, prompt_tokens: np.ndarray, sampling: Sampling, *, ahead: bool = False, **options: Any
    ) -> Flight:
        """Start to sample responses; see :meth:`RolloutGroup.generation` and :meth:`Serving.begin`."""
        return self._serving.begin(
            lambda engines: engines.generation(requests, prompt_tokens, sampling, **options),
            options["version"],
            ahead=ahead,
        )

    def finish(self, flight: Flight) -> Batch:
        """See :meth:`Serving.finish`."""
        return self._serving.finish(flight)

    # --- starting ------------------------------------------------------------------------------------------------

    def _start(self, data_sources: Sequence[str], status: Callable[[str], None]) -> None:
        config = self.config
        start = RunStarter(config, self.calls, self.pools, self.started, self.pythons)
        roles, device, serving_pool = config.roles.megatron, config.run.device, config.roles.rollout.pool
        hosted = {name: pool for name, pool in self.pools.items() if any(r.pool == name for r in roles.values())}
        shared = serving_pool in hosted
        sleeping = shared and device == "cuda" and config.roles.rollout.sleep != "off"

        started = [start.pool(name, pool) for name, pool in hosted.items()]
        started += [start.rewards(), [] if shared else start.engines()]
        status(f"starting {sum(map(len, started))} processes")
        *placed, scorers, serving = start.located(*started)
        start.check_stacks(*((group, MEGATRON[device]) for group in placed), (serving, ROLLOUT[device]))
        members = dict(zip(hosted, placed, strict=True))
        joined = start.join(members)
        self.device_name = next(iter(joined.values()))[0].name
        if device == "cuda":
            alone = {} if shared else {serving_pool: start.engine_devices(serving)}
            check_fit(config, {**joined, **alone})
            check_nodes(config, {**joined, **alone})
        if shared:
            (serving,) = start.located(start.engines_beside(members[serving_pool]))
            start.check_stacks((serving, ROLLOUT[device]))
        rollout, settings = RolloutGroup(serving, self.calls), self._engine_settings(sleeping)
        functions = Group(scorers, self.calls)
        engines = rollout.each("build", lambda _: (settings,))
        scoring = (config.model_folder("actor"), config.roles.reward.absolute(), list(data_sources))
        rewards = functions.each("build", lambda _: scoring)
        if shared:  # vLLM measures what memory is left to it, so nothing else may come and go meanwhile
            status("starting the engines")
            self.calls.gather(engines)
            if sleeping:
                self.calls.gather(rollout.ask("sleep", lambda _: ()))
        groups = megatron_groups(roles, config.pools, members, self.calls)
        status("loading models")
        building = [
            group.build(roles[name], config.model_folder(name), config.run, config.ppo.optimizers.get(name))
            for name, group in groups.items()
        ]
        self.calls.gather(*building, rewards, *([] if shared else [engines]))
        self.actor, self.critic, self.reference = groups["actor"], groups.get("critic"), groups.get("reference")
        if config.reference_is_base:
            self.reference = self.actor.base("reference")
        self.reward = RewardGroup(functions, groups.get("reward"), config.roles.reward, config.model_folder("actor"))
        status("connecting actor and engines")
        offloading = [
            group
            for name, group in groups.items()
            if roles[name].offload != "none" and roles[name].pool == serving_pool
        ]
        self._weights = WeightSync(config, self.calls, self.actor, rollout, offloading, sleeping=sleeping)
        # Where an engine shares devices, its successor would have to measure them empty: all starts over.
        limit = 0 if shared else config.run.restarts
        self._serving = Serving(start, settings, self._weights, replacements=limit, status=status)
        self.streaming = Streaming(self._serving, self.calls)

    def _engine_settings(self, sleeping: bool) -> EngineSettings:
        config, rollout = self.config, self.config.roles.rollout
        return EngineSettings(
            folder=config.model_folder("actor"),
            tp=rollout.tp,
            dtype=config.run.dtype,
            max_tokens=config.data.max_prompt + config.data.max_response,
            max_sequences=rollout.max_sequences,
            memory_fraction=rollout.memory_fraction,
            kv_cache_gib=rollout.kv_cache_gib,
            on_cuda=config.run.device == "cuda",
            sleep=rollout.sleep if sleeping else "off",
            seed=config.run.seed,
            stop_token_ids=rollout.stop_token_ids,
        )
