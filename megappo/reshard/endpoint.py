"""One rank's end of the weight sync: its part of the plan, the transports to its peers, and the proof."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

import torch

from megappo.reshard.actor_to_rollout import NAMED, Meeting, Receipt, TransferSpec
from megappo.reshard.copies import Copy
from megappo.reshard.gloo import SUMS, GlooTransport
from megappo.reshard.messages import make_messages
from megappo.reshard.nccl import AHEAD, NcclTransport
from megappo.reshard.routes import DEVICE, NETWORK, distance
from megappo.reshard.shared_memory import SharedMemory, open_rings
from megappo.reshard.transfer import ON_DEVICE, ON_HOST, KeptBlocks, carry_out, find_blocks
from megappo.reshard.transport import Transport
from megappo.reshard.verify import Verifier, stamped


class Passing(Protocol):
    """Parameters that are received into memory that is not the receiver's own, to be processed."""

    @property
    def held(self) -> Mapping[str, torch.Tensor]:
        """Those asked for since the last phase."""

    def install(self) -> None:
        """Process what is held, all of which has arrived, and let go of it."""


class Endpoint:
    """A rank of the transfer group. Making one is collective over the group.

    Attributes:
        rank: in the transfer group.
        part: this rank's part of the plan.
        fingerprint: of the plan, to be compared with the others' before anything is sent.
        verifier: checksums.
    """

    def __init__(self, transfer: TransferSpec, rank: int, params: Mapping[str, torch.Tensor], meeting: Meeting) -> None:
        """Plan, and join the group.

        Args:
            params: this rank's parameters by the names that the plan uses.

        Raises:
            TransferError: a rank did not come within the limit.
        """
        sample = next(iter(params.values()))
        item = sample.element_size()
        self._on_host = sample.device.type == "cpu"
        self._pace = ON_HOST if self._on_host else ON_DEVICE
        self.rank, self._transfer = rank, transfer
        self.part = transfer.part(rank)
        self.fingerprint = transfer.fingerprint(rank, self.part)
        self.verifier = Verifier(rank, self.part, meeting.verify, sample.device)
        bucket = item * _largest_message(self.part, self._pace.message_bytes // item)
        self._gloo = GlooTransport(
            meeting.host, meeting.port, rank, transfer.world, meeting.timeout_s, bucket, transfer.describe
        )
        self._carriers: dict[int, Transport] = {}
        if meeting.transport == "auto":
            self._choose_carriers(bucket, sample.device)
        self._messages = make_messages(
            self.part,
            self._pace.message_bytes // item,
            self._pace.direct_bytes // item,
            transfer.phase,
            # NCCL sees to it itself; what leaves a GPU over gloo is packed there, for one copy over the bus.
            may_be_direct=lambda copy: self._on_host and not isinstance(self._carrier(_peer(rank, copy)), SharedMemory),
        )
        self._blocks = KeptBlocks(rank, self._messages)

    def sync(self, version: int, params: Mapping[str, torch.Tensor], passing: Passing | None = None) -> Receipt:
        """Send and receive what the plan says, and prove it.

        Args:
            version: of the weights.
            params: this rank's parameters by the names that the plan uses.
            passing: those of ``params`` that are gone at the end of each phase.

        Raises:
            TransferError: a peer died or took longer than the limit.
        """
        try:
            return self._sync(version, params, passing)
        except Exception:
            for transport in dict.fromkeys(self._carriers.values()):
                transport.abort()
            raise

    def _sync(self, version: int, params: Mapping[str, torch.Tensor], passing: Passing | None) -> Receipt:
        sent: dict[int, torch.Tensor] = {}
        received: dict[int, torch.Tensor] = {}
        # While others still receive, if it is soon launched: a GPU takes only so much work in advance.
        early = passing is None and (self._on_host or not self.verifier.looks_at_all(version))

        def under_way() -> None:
            if early:
                sent.update(self.verifier.sent_sums(version, params))

        def landing() -> None:
            if early:
                received.update(self.verifier.received_sums(version, params))

        def arrived() -> None:
            if passing is not None:
                self.verifier.note(version, passing.held)
                passing.install()

        blocks_of = self._blocks.of(params) if passing is None else partial(find_blocks, self.rank, params)
        in_flight = self._pace.in_flight
        moved = carry_out(self.rank, self._messages, in_flight, blocks_of, self._carrier, arrived, under_way, landing)
        if not early:
            sent, received = self.verifier.sent_sums(version, params), self.verifier.received_sums(version, params)
        return Receipt(*moved, *self._compare(version, sent, received))

    def mismatches(
        self, version: int, found: Mapping[int, torch.Tensor], said: Mapping[int, torch.Tensor]
    ) -> tuple[int, tuple[str, ...]]:
        """How many regions differ from what the senders said, and a line for each of the first :data:`NAMED`.

        See :meth:`Verifier.differences`.
        """
        describe, different = self._transfer.describe, self.verifier.differences(version, found, said)
        return len(different), tuple(
            f"weight sync {version}: {copy.name} at {copy.param}{list(copy.offset)}, size {list(copy.size)}, came to "
            f"{describe(copy.destination)} otherwise than {describe(copy.source)} has it"
            + (f" (which sent version {sent})" if sent != version else "")
            for copy, sent in different[:NAMED]
        )

    def _carrier(self, peer: int) -> Transport:
        return self._carriers.get(peer, self._gloo)

    def _compare(
        self, version: int, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor]
    ) -> tuple[int, tuple[str, ...]]:
        """Exchange checksums of what was sent and received; see :meth:`mismatches`."""
        said = self.verifier.empty_sums(version)
        works = [self._gloo.expect(sums, source, SUMS) for source, sums in said.items()]
        works += [self._gloo.post(stamped(version, sums), to, SUMS) for to, sums in sent.items()]
        for work in works:
            work.wait()
        return self.mismatches(version, received, said)

    def _choose_carriers(self, bucket: int, device: torch.device) -> None:
        transfer, places = self._transfer, self._transfer.places
        receivers = {copy.destination for copy in self.part if copy.source == self.rank}
        senders = {copy.source for copy in self.part if copy.destination == self.rank}
        far = {peer: distance(places, self.rank, peer) for peer in receivers | senders}
        if self._on_host:
            near = {peer for peer, link in far.items() if link != NETWORK}
        else:  # NCCL refuses two ranks on one GPU; if nothing leaves it, parameters are mapped and no messages are sent
            apart = [peer for peer, link in far.items() if link != DEVICE]
            near = far.keys() - apart
            if near and not transfer.layerwise and transfer.stays_on_device():
                near = set()
            nccl = NcclTransport(self._gloo, self._pace.direct_bytes, device, len(apart), 0 if near else AHEAD)
            self._carriers = dict.fromkeys(apart, nccl)
        if near:
            buckets = self._pace.in_flight
            shared, reached = open_rings(self._gloo, receivers & near, senders & near, buckets, bucket, device)
            self._carriers |= dict.fromkeys(reached, shared)


def _peer(rank: int, copy: Copy) -> int:
    return copy.destination if copy.source == rank else copy.source


def _largest_message(part: Sequence[Copy], limit: int) -> int:
    """Elements: a single row is never cut."""
    by_pair: Counter[tuple[int, int]] = Counter()
    for copy in part:
        by_pair[copy.source, copy.destination] += copy.elements
    rows = (copy.elements // copy.size[0] for copy in part)
    return max(min(limit, max(by_pair.values(), default=1)), *rows, 1)
