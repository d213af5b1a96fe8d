"""Layers that an engine repacks after loading are refused by name."""

from __future__ import annotations

import torch

from megappo.workers.direct_writes import refusals


class UnquantizedLinearMethod: ...


class Fp8LinearMethod: ...


class Layer(torch.nn.Module):
    """As vLLM's layers look after loading."""

    def __init__(self, **attributes: object) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, 2))
        for name, value in attributes.items():
            setattr(self, name, value)


def test_only_what_computes_from_its_parameters_is_written_into() -> None:
    def packed(x: torch.Tensor) -> torch.Tensor:
        return x

    method = UnquantizedLinearMethod()
    model = torch.nn.Module()
    model.on_gpu = Layer(quant_method=method)
    model.on_cpu = Layer(quant_method=method, cpu_linear=torch.nn.functional.linear)
    model.norm = Layer()
    model.attention = torch.nn.Module()  # has a hook, but no parameters
    model.attention.process_weights_after_loading = lambda dtype: None  # type: ignore[assignment]
    assert refusals(model) == []
    model.repacked = Layer(quant_method=method, cpu_linear=packed)
    model.quantised = Layer(quant_method=Fp8LinearMethod())
    model.absorbed = Layer(process_weights_after_loading=packed)
    found = refusals(model)
    assert [line.split(" changes")[0] for line in found] == [
        "repacked: vLLM's UnquantizedLinearMethod",
        "quantised: vLLM's Fp8LinearMethod",
        "absorbed: vLLM's Layer",
    ]
