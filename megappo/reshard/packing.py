"""A message as few pieces of memory: what travels from where it lies, and what by way of a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megappo.reshard.transport import Blocks, size_of


class Packing:
    """What travels of a message's blocks from where it lies, and what by way of a bucket.

    All small blocks are packed, and those that do not lie in one piece. Both ends cut a message into the same pieces,
    whatever they pack: all small blocks are one, each large block is one.
    """

    def __init__(self, blocks: Blocks, direct_bytes: int) -> None:
        small = [block for block in blocks if block.nbytes < direct_bytes]
        large = [block for block in blocks if block.nbytes >= direct_bytes]
        strided = [block for block in large if not block.is_contiguous()]
        packed = small + strided
        self.nbytes, self._small, self._small_bytes = size_of(packed), len(small), size_of(small)
        self._dtype, self._sizes = blocks[0].dtype, [block.numel() for block in packed]
        self._packed = [block.view(-1) if block.is_contiguous() else block for block in packed]
        self._large = [_bytes(block) if block.is_contiguous() else None for block in large]

    def message(self, bucket: torch.Tensor | None) -> PackedMessage:
        """It, by way of a bucket, if it needs one."""
        places: list[torch.Tensor] = []
        if bucket is not None:
            cuts = bucket[: self.nbytes].view(self._dtype).split(self._sizes)
            pairs = zip(cuts, self._packed, strict=True)
            places = [cut.view(block.shape) if block.dim() > 1 else cut for cut, block in pairs]
        strided = iter(places[self._small :])
        pieces = [_bytes(next(strided)) if piece is None else piece for piece in self._large]
        together = [] if bucket is None or not self._small_bytes else [bucket[: self._small_bytes]]
        return PackedMessage(together + pieces, self._packed, places, bucket)


class PackedMessage(NamedTuple):
    """Pieces of memory that travel, uint8; and the blocks that are packed, with their places in the bucket, if any."""

    pieces: Sequence[torch.Tensor]
    blocks: list[torch.Tensor]
    places: list[torch.Tensor]
    bucket: torch.Tensor | None

    def pack(self) -> None:
        if self.blocks:
            torch._foreach_copy_(self.places, self.blocks)

    def unpack(self) -> None:
        if self.blocks:
            torch._foreach_copy_(self.blocks, self.places)


def _bytes(piece: torch.Tensor) -> torch.Tensor:
    return piece.view(-1).view(torch.uint8)
