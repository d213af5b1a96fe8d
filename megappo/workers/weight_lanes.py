"""How new weights get into each layer of an engine: straight into its parameters, staged, or not at all.

vLLM post-processes weights after loading: it quantises, transposes, repacks. Where it does anything but keep a
parameter as it was loaded, writing into it would change nothing that is computed, or the wrong thing. Such layers are
staged, if nothing but weights of our table goes into them: see :mod:`megappo.workers.staged_layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import torch

KEEPS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
"""vLLM's methods that compute from the parameter itself; on CPU, if the layer's ``cpu_linear`` does."""


class Layer(NamedTuple):
    """A layer that new weights reach through vLLM's own processing.

    Attributes:
        module: vLLM's.
        inputs: what its loader fills, by the module's names: the planned parameter and the loader's shape.
    """

    module: torch.nn.Module
    inputs: Mapping[str, tuple[str, tuple[int, ...]]]


def sort_layers(
    model: torch.nn.Module,
    planned: Collection[str],
    dtype: torch.dtype,
    loaded_as: Callable[[torch.nn.Module], Mapping[str, torch.Tensor]],
) -> tuple[dict[str, Layer], list[str]]:
    """The staged layers of a loaded model, and those that are refused.

    Layers without a method of vLLM's (norms) compute from their parameters, unless they have a hook of their own.

    Args:
        planned: names of the parameters that weights are planned for.
        dtype: in which weights come.
        loaded_as: a module's parameters as its loader knew them, where vLLM has noted that.

    Returns:
        Staged layers by name; and one line for each refused one.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    staged: dict[str, Layer] = {}
    refused: list[str] = []
    for prefix, module in model.named_modules():
        what = _changed_by(module) if next(module.parameters(recurse=False), None) is not None else None
        if what is None:
            continue
        live = dict(module.named_parameters(recurse=False))
        shapes = {**{name: live[name] for name in live.keys() & {BIAS}}, **loaded_as(module)}
        targets = {name: names.get(id(live.get(name)), f"{prefix}.{name}") for name in shapes}
        if problem := _unstageable(module, shapes, targets, planned, dtype):
            refused.append(
                f"{prefix}: vLLM's {what} changes weights after loading, and new ones cannot be put through it: "
                f"{problem}. Use an unquantised model and vLLM's default kernels"
            )
        else:
            inputs = {name: (targets[name], tuple(param.shape)) for name, param in shapes.items()}
            staged[prefix] = Layer(module, inputs)
    return staged, refused


def _changed_by(module: torch.nn.Module) -> str | None:
    method = getattr(module, "quant_method", None)
    if method is not None:
        plain = getattr(module, "cpu_linear", torch.nn.functional.linear) is torch.nn.functional.linear
        return None if type(method).__name__ in KEEPS and plain else type(method).__name__
    return type(module).__name__ if hasattr(module, "process_weights_after_loading") else None


def _unstageable(
    module: torch.nn.Module,
    shapes: Mapping[str, torch.Tensor],
    targets: Mapping[str, str],
    planned: Collection[str],
    dtype: torch.dtype,
) -> str | None:
    """Why a layer's weights cannot be received and loaded anew; None if they can."""
    if not hasattr(getattr(module, "quant_method", None), "process_weights_after_loading"):
        return "it has no method that does so for this layer alone"
    if not shapes.keys() - {BIAS}:
        return "vLLM has not noted in which shapes they were loaded"
    if unknown := sorted(name for name in shapes if targets[name] not in planned):
        return f"its {', '.join(unknown)} is no weight of the model"
    if other := sorted(name for name, param in shapes.items() if name != BIAS and param.dtype != dtype):
        return f"its {', '.join(other)} is loaded as {shapes[other[0]].dtype}, not {dtype}"
    return None


BIAS = "bias"
"""vLLM's reload leaves biases in place, in whatever type the kernel wants; new values are converted."""
