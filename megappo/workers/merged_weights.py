"""An engine's weights under low-rank adapters: kept as the model's folder has them, and merged with each new adapter.

Only adapters travel. The engine computes from merged weights, so that it generates as fast as without adapters, on
whichever kernels, and from the very weights that an export of the run holds. The unmerged ones wait in host memory: a
merged weight is always made from them, and an engine that gave up its weights to sleep has them back by the next sync.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby

import torch

from megappo.models.lora import is_adapter
from megappo.models.spec import ModelSpec
from megappo.reshard.boxes import Box
from megappo.reshard.copies import block
from megappo.reshard.load_weights import load_weights
from megappo.reshard.merge import Update, merge, updates
from megappo.workers.offload import pinned


class MergedWeights:
    """One worker's base weights and adapters.

    Attributes:
        adapters: the factors that this worker's weights need, on its device; new ones are received into them.
    """

    def __init__(
        self,
        folder: str,
        model: ModelSpec,
        boxes: list[Box],
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Read this worker's part of the base weights.

        Args:
            folder: the model's.
            model: with adapters.
            boxes: what this worker holds, factors included.
            shapes: of its parameters, as its loader knows them.
        """
        assert model.lora is not None
        self._scale, self._on_cuda = model.lora.scale, device.type == "cuda"
        base = [box for box in boxes if not is_adapter(box.name)]
        names = dict.fromkeys(box.param for box in base)
        sizes = {name: torch.Size(shapes[name]).numel() for name in names}
        flat = pinned(sum(sizes.values()) * dtype.itemsize, "weights that adapters are merged into").view(dtype)
        self._base = {
            name: part.view(shapes[name]) for name, part in zip(names, flat.split(list(sizes.values())), strict=True)
        }
        load_weights(folder, model.base, base, self._base)
        self._layers = {box.param: box.name.split(".layers.")[-1].split(".")[0] for box in base}
        self._updates: dict[str, list[Update]] = {}
        for update in updates(boxes):
            self._updates.setdefault(update.box.param, []).append(update)
        self.adapters = {
            box.param: torch.zeros(box.size, dtype=dtype, device=device) for box in boxes if is_adapter(box.name)
        }

    @torch.no_grad()
    def write(self, params: Mapping[str, torch.Tensor], layer_done: Callable[[], None] = lambda: None) -> None:
        """Give all of the engine's parameters their weights, with the adapters as they are now.

        Args:
            layer_done: called after each decoder layer, and after what comes before and after them.
        """
        for _, names in groupby(self._base, key=lambda name: self._layers[name]):
            for name in names:
                params[name].copy_(self._base[name], non_blocking=True)
                for box, a, columns, b, rows in self._updates.get(name, ()):
                    weight = params[name][block(box.local_offset, box.size)]
                    merge(weight, self.adapters[a][:, columns], self.adapters[b][rows], self._scale)
            layer_done()
        if self._on_cuda:
            torch.cuda.synchronize()
