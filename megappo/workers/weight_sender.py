"""The actor's end of the weight sync, in one Megatron rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megappo.reshard.actor_to_rollout import TransferSpec
from megappo.reshard.cuda_ipc import SharedParams, share_params
from megappo.reshard.gloo import GlooTransport
from megappo.reshard.plan import make_messages, plan_hash
from megappo.reshard.transfer import BUCKET_BYTES, send_weights
from megappo.workers.megatron_role import MegatronRole


class WeightSender:
    """Sends the current weights of a role to the rollout engines, as planned when it was made."""

    def __init__(self, role: MegatronRole, transfer: TransferSpec, host: str, port: int, timeout_s: float) -> None:
        """Join the transfer group; returns once all its ranks have come."""
        plan = transfer.plan()
        self.plan_hash = plan_hash(plan)
        self.role = role
        self.messages = make_messages(plan, BUCKET_BYTES // role.dtype.itemsize)
        self.transport = GlooTransport(host, port, dist.get_rank(), transfer.world, timeout_s)

    def send(self) -> int:
        """Send; returns this rank's bytes."""
        self.role.residence.work(training=False)
        return send_weights(self.transport, self.messages, self.role.params)

    def share(self) -> SharedParams | None:
        """The weights for receivers on this rank's device to map, until they leave it; None if nobody needs them."""
        if not any(message.source == self.transport.rank for message in self.messages):
            return None
        self.role.residence.work(training=False)
        torch.cuda.current_stream().synchronize()  # others see them as they are now
        return share_params(self.role.params)
