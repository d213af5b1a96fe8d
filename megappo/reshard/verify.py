"""Proof in production: checksums of what senders have and of what receivers have after receipt, compared every sync.

A region is seen as signed 32-bit words w in the order of its elements (zeros pad the last), in rows of 2^15; its
checksum is sum_k r_k sum_i w_ki m_i modulo 2^64, with fixed odd 64-bit multipliers r and m. Integer sums do not depend
on their order, so it is the same on every device. As multipliers are odd, a change in any single word is always seen;
any other change, such as words in each other's places or other signs, goes unseen by a chance of about 2^-32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

import numpy as np
import torch

from megappo.config import Verify
from megappo.reshard.copies import Copy, cut
from megappo.reshard.transfer import destination_block, source_block

REGION = 1 << 18
"""Most elements of one region."""

SHARE, MOST = 256, 16
"""A sample is one region in 256 of what one rank sends to another, at most 16: others at each sync, all in time."""

TOGETHER = 32
"""Regions whose checksums a GPU takes in one go: launches take longer than sums. At most 96 MiB of it meanwhile."""

View = Callable[[Mapping[str, torch.Tensor], Copy], torch.Tensor]
"""What a region is in a rank's parameters."""

CPU = torch.device("cpu")

ROW = 1 << 15
"""Words; what a CPU computes with at a time stays in its cache."""


class Verifier:
    """Checksums of one rank's part of the plan, by peer.

    A sample is taken of all syncs but the first, which is looked at as a whole: what is always wrong is found there.
    """

    def __init__(self, rank: int, part: Iterable[Copy], verify: Verify, device: torch.device = CPU) -> None:
        """Cut the part into regions.

        Args:
            part: the copies that ``rank`` sends or receives, in the order of the plan.
            device: of the parameters.
        """
        if verify != "off" and device != CPU:
            _all_multipliers(device)  # now: copying them would wait for all that the device has to do
        self.verify = verify
        self._first: int | None = None
        self._noted: dict[Copy, int] = {}
        self.sent: dict[int, list[Copy]] = {}
        self.received: dict[int, list[Copy]] = {}
        for copy in part if verify != "off" else ():
            for side, end, peer in (
                (self.sent, copy.source, copy.destination),
                (self.received, copy.destination, copy.source),
            ):
                if end == rank:
                    side.setdefault(peer, []).extend(cut(copy, REGION))

    def looks_at_all(self, version: int) -> bool:
        """Whether all regions of a sync are looked at, and not a sample."""
        if self._first is None:
            self._first = version
        return self.verify == "full" or version == self._first

    def note(self, version: int, passing: Mapping[str, torch.Tensor]) -> None:
        """Take this sync's checksums of regions in parameters that will be gone before its end."""
        for side, view in ((self.received, destination_block), (self.sent, source_block)):
            for regions in side.values() if passing else ():
                chosen = [region for region in self._chosen(version, regions) if _own_param(region, view) in passing]
                sums = checksums([view(passing, region) for region in chosen])
                self._noted.update(zip(chosen, sums.tolist(), strict=True))

    def sent_sums(self, version: int, params: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Checksums of this sync's regions, by receiver: int64 [regions], on their device, which may still be at it.

        Those of whose regions none is looked at are left out.
        """
        return self._sums(version, params, self.sent, source_block)

    def received_sums(self, version: int, params: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
        """The same of what was received, by sender."""
        return self._sums(version, params, self.received, destination_block)

    def empty_sums(self, version: int) -> dict[int, torch.Tensor]:
        """Where to put what senders say (:func:`stamped`), by sender."""
        return {
            peer: torch.empty(1 + len(chosen), dtype=torch.int64)
            for peer, regions in self.received.items()
            if (chosen := self._chosen(version, regions))
        }

    def differences(
        self, version: int, found: Mapping[int, torch.Tensor], said: Mapping[int, torch.Tensor]
    ) -> list[tuple[Copy, int]]:
        """Regions that differ from what their senders said, each with its sender's version.

        Args:
            found: :meth:`received_sums`.
            said: by sender, its :meth:`sent_sums`, :func:`stamped`.
        """
        differ = []
        for peer, sums in found.items():
            chosen, own = self._chosen(version, self.received[peer]), stamped(version, sums)
            wrong = (own != said[peer])[1:] | (own[0] != said[peer][0])
            differ += [(chosen[at], int(said[peer][0])) for at in wrong.nonzero().flatten().tolist()]
        return differ

    def _sums(
        self, version: int, params: Mapping[str, torch.Tensor], side: Mapping[int, Sequence[Copy]], view: View
    ) -> dict[int, torch.Tensor]:
        chosen = {peer: self._chosen(version, regions) for peer, regions in side.items()}
        return {peer: self._with_noted(regions, params, view) for peer, regions in chosen.items() if regions}

    def _with_noted(self, regions: Sequence[Copy], params: Mapping[str, torch.Tensor], view: View) -> torch.Tensor:
        now = [region for region in regions if region not in self._noted]
        found = checksums([view(params, region) for region in now])
        if len(now) == len(regions):
            return found
        known = dict(zip(now, found.tolist(), strict=True))
        return torch.tensor([known[region] if region in known else self._noted.pop(region) for region in regions])

    def _chosen(self, version: int, regions: Sequence[Copy]) -> Sequence[Copy]:
        if self.looks_at_all(version):
            return regions
        stride = max(SHARE, -(-len(regions) // MOST))
        turn = 61 * regions[0].source + 97 * regions[0].destination  # pairs with few regions: not all in one sync
        return regions[(version + turn) % stride :: stride]


def _own_param(region: Copy, view: View) -> str | None:
    """The parameter in which this rank holds a region for a while only."""
    return region.param if view is destination_block else region.source_param if region.wave else None


def stamped(version: int, sums: torch.Tensor) -> torch.Tensor:
    """What a sender says: its version, and checksums. int64 [1 + regions] on the CPU; waits for the device."""
    return torch.cat([torch.tensor([version]), sums.cpu()])


def checksums(blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    """The checksum of each region, of at most :data:`REGION` elements; all of one dtype and on one device.

    Returns:
        int64 [regions] on that device, which may still be at it.
    """
    if not blocks or blocks[0].device.type == "cpu":
        return torch.tensor([_checksum(block) for block in blocks], dtype=torch.int64)
    return torch.cat([_device_checksums(blocks[at : at + TOGETHER]) for at in range(0, len(blocks), TOGETHER)])


def _checksum(block: torch.Tensor) -> int:
    """One region's, on the CPU."""
    data = block.contiguous().view(-1)
    if data.data_ptr() % 4 or data.nbytes % 4:
        padded = data.new_zeros(-(-data.nbytes // 4) * 4 // data.element_size())
        padded[: data.numel()] = data
        data = padded
    rows, multipliers, wide = data.view(torch.int32).split(ROW), _multipliers(ROW), _wide_row()
    sums = [int(torch.dot(wide[: len(row)].copy_(row), multipliers[: len(row)])) for row in rows]
    return int(torch.dot(torch.tensor(sums), _row_multipliers()[: len(rows)]))


def _device_checksums(blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Those of several regions together: on a GPU it is launches that take time. int64 [regions]."""
    size, device = blocks[0].element_size(), blocks[0].device
    words = -(-max(block.numel() for block in blocks) * size // 4)
    staged = torch.zeros(len(blocks), words * 4 // size, dtype=blocks[0].dtype, device=device)
    places = [row[: block.numel()].view(block.shape) for row, block in zip(staged, blocks, strict=True)]
    torch._foreach_copy_(places, list(blocks))
    return (staged.view(torch.int32) * _all_multipliers(device)[:words]).sum(1)


@cache
def _wide_row() -> torch.Tensor:
    """Where a row is made 64 bits wide: memory that is new each time costs more than the sums."""
    return torch.empty(ROW, dtype=torch.int64)


@cache
def _multipliers(count: int, start: int = 1) -> torch.Tensor:
    """Odd int64 numbers that look random: SplitMix64's from ``start`` on, with the last bit set."""
    x = np.arange(start, start + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((x ^ (x >> np.uint64(31))) | np.uint64(1)).view(np.int64))


def _row_multipliers() -> torch.Tensor:
    """Others than those inside rows, or words (k, i) and (i, k) could change places unseen."""
    return _multipliers(REGION // ROW, start=1 + ROW)


@cache
def _all_multipliers(device: torch.device) -> torch.Tensor:
    """Those of every word of the largest region (of four-byte elements)."""
    return (_row_multipliers()[:, None] * _multipliers(ROW)).view(-1).to(device)
