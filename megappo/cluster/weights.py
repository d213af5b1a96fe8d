"""The actor's new weights on their way to the engines, and whose turn it is on devices that they share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from megappo.cluster.calls import Calls
from megappo.cluster.groups import MegatronGroup, RolloutGroup
from megappo.cluster.start import host_store
from megappo.config import Config
from megappo.models.spec import read_model_spec, with_lora
from megappo.reshard.actor_to_rollout import Meeting, Receipt, TransferSpec, total_receipt
from megappo.reshard.agreement import disagreement

PEERS_FIRST = 0.9
"""Ranks wait for each other a little less long than the driver waits for them: they know better who is late."""


class WeightMismatch(RuntimeError):
    """Weights did not arrive as sent, or would not arrive where they belong; training would use wrong ones."""


class WeightSync:
    """Actor and engines, connected.

    Its state: whether the engines sleep, and whether they have the actor's memory mapped.
    """

    def __init__(
        self,
        config: Config,
        calls: Calls,
        actor: MegatronGroup,
        rollout: RolloutGroup,
        beside: Sequence[MegatronGroup],
        *,
        sleeping: bool,
    ) -> None:
        """Form the transfer group of actor and engines, and prove that weights will land where they belong.

        Args:
            beside: the roles that leave the devices which they share with the engines, between turns.
            sleeping: whether engines give their memory to others between turns, and have done so.

        Raises:
            WeightMismatch: weights would go to wrong places.
        """
        self.config, self.calls = config, calls
        self.actor, self.rollout, self.beside = actor, rollout, tuple(beside)
        self._sleeping, self._asleep, self._mapped = sleeping, sleeping, False
        self._connect()

    def reconnect(self, rollout: RolloutGroup) -> None:
        """Form the transfer group anew with these engines.

        Raises:
            WeightMismatch: weights would go to wrong places.
        """
        self.rollout = rollout
        self._connect()

    def rest(self) -> None:
        """Give the engines' memory to the roles that share their devices; a weight sync wakes them again."""
        if self._sleeping and not self._asleep:
            self._ask_engines("sleep")
            self._asleep = True

    @contextmanager
    def everything_loaded(self, version: int) -> Iterator[None]:
        """Room in here for roles to have their optimizer's state on devices that they share with engines.

        Args:
            version: of the actor's weights, which the engines get again afterwards.
        """
        if not self.beside:
            yield
            return
        self.rest()
        yield
        self.sync(version)

    @contextmanager
    def engines_resting(self, version: int) -> Iterator[None]:
        """The engines' memory is the others' in here, where it ever is; see :meth:`everything_loaded`."""
        self.rest()
        yield
        if self._asleep:
            self.sync(version)

    def sync(self, version: int) -> int:
        """Give all engines the actor's current weights; returns the bytes received over all engines.

        Raises:
            WeightMismatch: they did not arrive as they were sent.
            WorkerFailed: a worker died, or did not answer in time.
        """
        if self._asleep:
            for group in self.beside[:1]:  # all of them are in the same processes
                self.calls.gather(group.each("settle", lambda _: ()))
            self._ask_engines("wake", "weights")
        if self._on_device:
            receipt, sent = self._copy_on_device(version), self._planned_bytes
        else:
            receiving = self.rollout.ask("receive_weights", lambda _: (version,), total_receipt)
            sending = self.actor.each("send_weights", lambda _: ("actor", version), sum)
            receipt, sent = self.calls.gather(receiving, sending)
            sent += receipt.sent  # passed on between workers
        if receipt.mismatches:
            raise WeightMismatch(receipt.complaint)
        if receipt.received != sent:
            raise WeightMismatch(f"weight sync {version}: {sent} bytes were sent, {receipt.received} received")
        if self._actor_weights_leave:
            self.calls.gather(self.actor.each("rest", lambda _: ("actor",)))
        if self._asleep:
            self._ask_engines("wake", "kv_cache")
            self._asleep = False
        return receipt.received

    def _copy_on_device(self, version: int) -> Receipt:
        if not self._mapped:
            (shared,) = self.calls.gather(self.actor.each("share_weights", lambda _: ("actor",)))
            self._ask_engines("open_shared", {rank: params for rank, params in enumerate(shared) if params})
            self._mapped = True
        sums: dict[int, Any] = {}
        if self.config.roles.rollout.verify != "off":
            (found,) = self.calls.gather(self.actor.each("weight_sums", lambda _: ("actor", version)))
            sums = dict(enumerate(found))
        (receipt,) = self.calls.gather(self.rollout.ask("receive_shared", lambda _: (version, sums), total_receipt))
        if self._actor_weights_leave:  # and come back to other places
            self._ask_engines("close_shared")
            self._mapped = False
        return receipt

    @property
    def _actor_weights_leave(self) -> bool:
        return self.config.roles.actor.offload == "all"

    def _ask_engines(self, method: str, *args: Any) -> list[Any]:
        (answers,) = self.calls.gather(self.rollout.ask(method, lambda _: args))
        return answers

    def _connect(self) -> None:
        """Form the transfer group of actor and engines, and prove that weights will land where they belong."""
        transfer = TransferSpec(
            model=with_lora(read_model_spec(self.config.model_folder("actor")), self.config.roles.actor.lora),
            actor=self.actor.layout,
            engines=len(self.rollout.members),
            engine_tp=self.config.roles.rollout.tp,
            fused_norms=self.config.run.device == "cuda",
            places=tuple(self._places()),
            forward=True,
        )
        first = RolloutGroup(self.rollout.members[:1], self.calls)  # the others run the same code
        ((probed,),) = self.calls.gather(first.ask("probe", lambda _: (transfer,)))
        if probed.problems:
            raise WeightMismatch(probed.complaint)
        transfer = replace(transfer, layerwise=bool(probed.staged))
        ((host, port),) = self.calls.gather(host_store(self.actor, self.config.run.timeout_s))
        rollout = self.config.roles.rollout
        limit_s = PEERS_FIRST * self.config.run.timeout_s
        meeting = Meeting(host, port, limit_s, rollout.verify, rollout.transport)
        receivers = self.rollout.ask("join_transfer", lambda engine: (transfer, engine, meeting))
        senders = self.actor.each("join_transfer", lambda _: ("actor", transfer, meeting))
        engines, actors = self.calls.gather(receivers, senders)
        shown = {**dict(actors), **{rank: mark for engine in engines for rank, mark in engine.items()}}
        if reason := disagreement(shown):
            raise WeightMismatch(reason)
        on_cuda = self.config.run.device == "cuda"
        # What is mapped is copied all at once, into parameters themselves.
        self._on_device = on_cuda and transfer.stays_on_device() and not transfer.layerwise
        if self._on_device:
            self._planned_bytes = (4 if self.config.run.dtype == "float32" else 2) * transfer.elements()

    def _places(self) -> Iterator[tuple[str, str]]:
        """(node, device) of each rank of the transfer group; CPU processes count as devices of their own."""
        on_cuda, tp = self.config.run.device == "cuda", self.config.roles.rollout.tp
        for rank, member in enumerate(self.actor.members):
            yield member.place.node, member.device if on_cuda else f"actor {rank}"
        for engine, member in enumerate(self.rollout.members):
            devices = member.device.split(",") if on_cuda else [f"engine {engine}.{at}" for at in range(tp)]
            yield from ((member.place.node, device) for device in devices)
