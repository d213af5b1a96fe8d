"""Whether new weights may be written straight into an engine's parameters.

vLLM post-processes weights after loading: it quantises, transposes, repacks. Where it does anything but keep a
parameter as it was loaded, writing into it would change nothing that is computed, or the wrong thing.
"""

from __future__ import annotations

import torch

KEEPS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
"""vLLM's methods that compute from the parameter itself; on CPU, if the layer's ``cpu_linear`` does."""


def refusals(model: torch.nn.Module) -> list[str]:
    """The layers of a loaded model whose weights cannot be replaced in place, one line each.

    Layers without a method of vLLM's (norms) compute from their parameters, unless they have a hook of their own.
    """
    return [
        f"{name}: vLLM's {what} changes weights after loading, so new ones cannot be written in place: "
        "use an unquantised model and vLLM's default kernels"
        for name, module in model.named_modules()
        if next(module.parameters(recurse=False), None) is not None and (what := _changed_by(module))
    ]


def _changed_by(module: torch.nn.Module) -> str | None:
    method = getattr(module, "quant_method", None)
    if method is not None:
        plain = getattr(module, "cpu_linear", torch.nn.functional.linear) is torch.nn.functional.linear
        return None if type(method).__name__ in KEEPS and plain else type(method).__name__
    return type(module).__name__ if hasattr(module, "process_weights_after_loading") else None
