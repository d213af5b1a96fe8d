"""The actor's end of the weight sync, in one Megatron rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megappo.reshard.actor_to_rollout import Meeting, TransferSpec
from megappo.reshard.cuda_ipc import SharedParams, share_params
from megappo.reshard.endpoint import Endpoint
from megappo.reshard.verify import stamped
from megappo.workers.megatron_role import MegatronRole


class WeightSender:
    """Sends the current weights of a role to the rollout engines, as planned when it was made.

    Attributes:
        endpoint: in the transfer group; its rank there is the one in the world.
    """

    def __init__(self, role: MegatronRole, transfer: TransferSpec, meeting: Meeting) -> None:
        """Join the transfer group; returns once all its ranks have come."""
        self.role = role
        self.endpoint = Endpoint(transfer, dist.get_rank(), role.params, meeting)

    def send(self, version: int) -> int:
        """Send; returns this rank's bytes."""
        self.role.residence.work(training=False)
        try:
            return self.endpoint.sync(version, self.role.params).sent
        except Exception:
            del self.endpoint  # peers notice at once; a new group has to be formed in any case
            raise

    def share(self) -> SharedParams | None:
        """The weights for receivers on this rank's device to map, until they leave it; None if nobody needs them."""
        sent = {copy.source_param for copy in self.endpoint.part if copy.source == self.endpoint.rank}
        if not sent:
            return None
        self.role.residence.work(training=False)
        torch.cuda.current_stream().synchronize()  # others see them as they are now
        return share_params({name: self.role.params[name] for name in sorted(sent)})

    def sums(self, version: int) -> dict[int, list[int]]:
        """What receivers that map the weights should find, by receiver; of :class:`megappo.reshard.verify.Verifier`."""
        self.role.residence.work(training=False)
        found = self.endpoint.verifier.sent_sums(version, self.role.params)
        return {receiver: stamped(version, sums).tolist() for receiver, sums in found.items()}
