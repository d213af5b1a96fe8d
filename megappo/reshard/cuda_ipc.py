"""Weights between processes that share a GPU: the receiver maps the sender's memory and copies planned blocks.

Nothing is packed and no extra memory is taken: each block goes straight from parameter to parameter, at the speed of a
copy on the device. One handle covers a whole storage, such as Megatron's parameter buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from megappo.reshard.copies import Copy, block
from megappo.reshard.rings import DEVICE_ARGUMENT


@dataclass(frozen=True)
class SharedParams:
    """A rank's parameters, as another process on the same device can open them.

    Attributes:
        storages: CUDA IPC handles, one a storage.
        views: by parameter, (storage, offset, shape, stride), in elements.
    """

    storages: tuple[tuple[Any, ...], ...]
    views: Mapping[str, tuple[int, int, tuple[int, ...], tuple[int, ...]]]


def share_params(params: Mapping[str, torch.Tensor]) -> SharedParams:
    """Export parameters. They must stay where they are as long as others use the result."""
    numbers: dict[int, int] = {}
    storages: list[tuple[Any, ...]] = []
    views: dict[str, tuple[int, int, tuple[int, ...], tuple[int, ...]]] = {}
    for name, param in params.items():
        storage = param.untyped_storage()
        if storage.data_ptr() not in numbers:
            numbers[storage.data_ptr()] = len(storages)
            whole = torch.empty(0, dtype=param.dtype, device=param.device).set_(storage)
            storages.append(reduce_tensor(whole)[1])
        at = numbers[storage.data_ptr()]
        views[name] = at, int(param.storage_offset()), tuple(param.shape), param.stride()
    return SharedParams(tuple(storages), views)


def open_params(shared: SharedParams) -> dict[str, torch.Tensor]:
    """Map another process's parameters into this one, on its current device."""
    index = torch.cuda.current_device()
    rebuild: Any = rebuild_cuda_tensor
    wholes = [rebuild(*args[:DEVICE_ARGUMENT], index, *args[DEVICE_ARGUMENT + 1 :]) for args in shared.storages]
    return {
        name: wholes[storage].as_strided(shape, stride, offset)
        for name, (storage, offset, shape, stride) in shared.views.items()
    }


class SharedReceiver:
    """Copies planned blocks from mapped parameters into this process's own."""

    def __init__(
        self, copies: Sequence[Copy], sources: Mapping[int, Mapping[str, torch.Tensor]], params: Mapping[str, Any]
    ) -> None:
        """Prepare.

        Args:
            copies: this rank's part of the plan.
            sources: mapped parameters by source rank.
            params: this process's parameters.
        """
        self._copies, self._sources, self._params = copies, sources, params
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    @torch.no_grad()
    def receive(self) -> int:
        """Copy; returns the bytes received, once they are there."""
        if self._pairs is None:  # only now, since an engine may have been asleep, its parameters without memory
            self._pairs = [
                _as_words(
                    self._params[c.param][block(c.offset, c.size)],
                    self._sources[c.source][c.source_param][block(c.source_offset, c.size)],
                )
                for c in self._copies
            ]
        whole = [pair for pair in self._pairs if pair[0].dtype == torch.int32]
        # A model has hundreds of blocks, most of them small: one kernel copies many of them.
        torch._foreach_copy_([to for to, _ in whole], [source for _, source in whole])
        for to, source in self._pairs:
            if to.dtype != torch.int32:
                to.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return sum(to.nbytes for to, _ in self._pairs)


def _as_words(to: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as flat runs of four-byte words if they are such runs; else as they are (cut by columns, odd sizes)."""
    runs = to.is_contiguous() and source.is_contiguous()
    if runs and all(x.nbytes % 4 == 0 and x.data_ptr() % 4 == 0 for x in (to, source)):
        return to.view(-1).view(torch.int32), source.view(-1).view(torch.int32)
    return to, source
