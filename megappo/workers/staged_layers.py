"""New weights for layers that vLLM repacks or quantises: received in the loader's shapes, put through its own reload.

vLLM keeps, for every layer, what its parameters looked like to the loader, and can do its processing again from there
(``model_loader/reload``, since 0.14): it makes the layer anew in those shapes, loads, processes, and copies the result
to where kernels and CUDA graphs expect it. We load into it what was planned for this worker, which is its own part
already. One decoder layer at a time is held in the loader's shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from megappo.workers.weight_lanes import Layer


def loaded_as(module: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    """A module's parameters as its loader knew them: on the meta device, with the loader's attributes."""
    params: Mapping[str, torch.Tensor] = get_layerwise_info(module).restore_metadata[0]
    return params


class StagedParams(Mapping[str, torch.Tensor]):
    """An engine's parameters as a plan sees them.

    Those of staged layers are memory in the loader's shapes, zeros when first asked for, until :meth:`install`.
    """

    def __init__(self, params: Mapping[str, torch.Tensor], layers: Mapping[str, Layer], vllm_config: Any) -> None:
        """Nothing is allocated yet.

        Args:
            params: all parameters of the engine's model.
            layers: the staged ones.
        """
        self._params, self._layers, self._vllm_config = params, layers, vllm_config
        self._shapes = {name: shape for layer in layers.values() for name, shape in layer.inputs.values()}
        some = next(iter(params.values()))
        self._dtype, self._device = vllm_config.model_config.dtype, some.device
        self._held: dict[str, torch.Tensor] = {}

    @property
    def held(self) -> Mapping[str, torch.Tensor]:
        """Staged parameters that have been asked for since the last :meth:`install`."""
        return self._held

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._shapes:
            return self._params[name]
        if name not in self._held:
            self._held[name] = torch.zeros(self._shapes[name], dtype=self._dtype, device=self._device)
        return self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._params.keys() | self._shapes.keys())

    def __len__(self) -> int:
        return len(self._params.keys() | self._shapes.keys())

    def install(self) -> None:
        """Put what is held through vLLM's processing, and let go of it. Layers that share a parameter each get it."""
        for layer in self._layers.values():
            tensors = {own: self._held.get(planned) for own, (planned, _) in layer.inputs.items()}
            if any(tensor is not None for tensor in tensors.values()):
                assert all(tensor is not None for tensor in tensors.values()), "half a layer was received"
                _reload(layer.module, tensors, self._vllm_config)  # type: ignore[arg-type]
        self._held = {}


@torch.no_grad()
def _reload(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], vllm_config: Any) -> None:
    """Load all parameters of one layer anew and process them."""
    live = dict(module.named_parameters(recurse=False))
    targets = [loaded_as(module).get(name, live.get(name)) for name in tensors]
    loaders = [getattr(target, "weight_loader", None) for target in targets]
    for target in targets:
        target.weight_loader = _load_whole  # type: ignore[union-attr]  # vLLM's would cut this worker's part out of it
    try:
        with set_current_vllm_config(vllm_config):
            initialize_layerwise_reload(module)
            for name, tensor in tensors.items():
                param: Any = getattr(module, name)
                param.weight_loader(param, tensor)
            finalize_layerwise_reload(module, vllm_config.model_config)
    finally:
        for target, loader in zip(targets, loaders, strict=True):
            if loader is None:
                del target.weight_loader  # type: ignore[union-attr]
            else:
                target.weight_loader = loader  # type: ignore[union-attr]


def _load_whole(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    param.data.copy_(loaded_weight)


@contextmanager
def in_loaders_shapes(layers: Mapping[str, Layer]) -> Iterator[None]:
    """Staged layers with empty parameters such as their loader knew, for a look at where it puts things.

    What layers share they share in here too.
    """
    kept = {name: dict(layer.module._parameters) for name, layer in layers.items()}
    made: dict[str, Any] = {}
    try:
        for name, layer in layers.items():
            for own, meta in loaded_as(layer.module).items():
                planned = layer.inputs[own][0] if own in layer.inputs else f"{name}.{own}"
                if planned not in made:
                    made[planned] = _like(meta, layer.module)
                layer.module._parameters[own] = made[planned]
        yield
    finally:
        for name, layer in layers.items():
            layer.module._parameters.clear()
            layer.module._parameters.update(kept[name])


def _like(meta: torch.Tensor, module: torch.nn.Module) -> Any:
    """A parameter on the host with the attributes that loaders look at."""
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    param = torch.empty_strided(meta.size(), meta.stride(), dtype=meta.dtype, device="cpu")
    param.__class__ = meta.__class__
    param.__dict__ = meta.__dict__.copy()
    restore_layer_refs(param, module)
    loader = getattr(param, "weight_loader", None)
    while getattr(loader, "__name__", "") == "online_process_loader":
        loader = loader.__wrapped__  # type: ignore[union-attr]
    if loader is not None:
        param.weight_loader = loader  # type: ignore[attr-defined]
    return param
