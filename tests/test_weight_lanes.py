"""Which layers of an engine new weights are written into, which are staged, and which are refused by name."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from megappo.workers.weight_lanes import Layer as StagedLayer
from megappo.workers.weight_lanes import sort_layers


class UnquantizedLinearMethod:
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None: ...


class Fp8LinearMethod(UnquantizedLinearMethod): ...


class Layer(torch.nn.Module):
    """As vLLM's layers look after loading; ``loaded`` is what its loader knew."""

    def __init__(self, loaded: dict[str, torch.Tensor] | None = None, **attributes: object) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, 2))
        self.loaded = loaded or {}
        for name, value in attributes.items():
            setattr(self, name, value)


def loaded_as(module: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    return getattr(module, "loaded", {})


def packed(x: torch.Tensor) -> torch.Tensor:
    return x


def test_layers_that_compute_from_their_parameters_are_written_into() -> None:
    method = UnquantizedLinearMethod()
    model = torch.nn.Module()
    model.on_gpu = Layer(quant_method=method)
    model.on_cpu = Layer(quant_method=method, cpu_linear=torch.nn.functional.linear)
    model.norm = Layer()
    model.attention = torch.nn.Module()  # has a hook, but no parameters
    model.attention.process_weights_after_loading = lambda dtype: None  # type: ignore[assignment]
    assert sort_layers(model, (), torch.float32, loaded_as) == ({}, [])


def test_what_staged_layers_share_they_share_while_a_loader_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    from megappo.workers import staged_layers

    weight = {"weight": torch.empty(4, 2, device="meta")}
    embedding, head, own = Layer(weight), Layer(weight), Layer(weight)
    own.weight = torch.nn.Parameter(torch.ones(2))  # in the kernel's form
    model = torch.nn.ModuleDict({"embedding": embedding, "head": head, "own": own})
    head.weight = embedding.weight
    planned = {"embedding": "embedding.weight", "head": "embedding.weight", "own": "own.weight"}
    staged = {name: StagedLayer(model[name], {"weight": (planned[name], (4, 2))}) for name in planned}
    monkeypatch.setattr(staged_layers, "loaded_as", loaded_as)
    with staged_layers.in_loaders_shapes(staged):
        assert {name: tuple(param.shape) for name, param in model.named_parameters()} == {
            "embedding.weight": (4, 2),
            "own.weight": (4, 2),
        }
    assert head.weight is embedding.weight and tuple(own.weight.shape) == (2,)


def test_repacked_layers_are_staged_or_refused_by_name() -> None:
    weight = {"weight": torch.empty(4, 2, device="meta", dtype=torch.bfloat16)}
    model = torch.nn.Module()
    model.repacked = Layer(weight, quant_method=UnquantizedLinearMethod(), cpu_linear=packed)
    model.repacked.bias = torch.nn.Parameter(torch.zeros(4))  # in the kernel's type
    model.quantised = Layer(weight, quant_method=Fp8LinearMethod(), weight_scale=torch.nn.Parameter(torch.ones(1)))
    model.tied = Layer(weight, quant_method=Fp8LinearMethod())
    model.tied.weight = model.quantised.weight
    model.absorbed = Layer(process_weights_after_loading=packed)
    model.unknown = Layer(quant_method=Fp8LinearMethod())
    scaled = {"weight": weight["weight"], "input_scale": torch.empty(1, device="meta")}
    model.scaled = Layer(scaled, quant_method=Fp8LinearMethod())
    model.packed = Layer({"weight": torch.empty(4, 2, dtype=torch.int32)}, quant_method=Fp8LinearMethod())
    planned = [f"{name}.{kind}" for name in dict(model.named_children()) for kind in ("weight", "bias")]
    staged, refused = sort_layers(model, planned, torch.bfloat16, loaded_as)
    assert {name: layer.inputs for name, layer in staged.items()} == {
        "repacked": {"bias": ("repacked.bias", (4,)), "weight": ("repacked.weight", (4, 2))},
        "quantised": {"weight": ("quantised.weight", (4, 2))},
        "tied": {"weight": ("quantised.weight", (4, 2))},
    }
    for line, (name, method, why) in zip(
        refused,
        [
            ("absorbed", "Layer", "no method that does so for this layer alone"),
            ("unknown", "Fp8LinearMethod", "vLLM has not noted in which shapes they were loaded"),
            ("scaled", "Fp8LinearMethod", "its input_scale is no weight of the model"),
            ("packed", "Fp8LinearMethod", "its weight is loaded as torch.int32, not torch.bfloat16"),
        ],
        strict=True,
    ):
        assert line.startswith(f"{name}: vLLM's {method} changes weights after loading") and why in line
