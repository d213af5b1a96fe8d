"""Megatron-core on CPU processes: the one place that knows Megatron was written for CUDA.

:func:`install` must run before anything of ``megatron.core`` is imported. Every ``megatron.core`` module then gets its
own view of ``torch`` in which ``torch.cuda`` is a CPU stand-in and ``device="cuda"`` means the CPU; nothing outside
Megatron sees a difference, but for ``Tensor.cuda``, which becomes the identity. Where CUDA is present it does nothing.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

_CPU = torch.device("cpu")
_FACTORIES = (
    *("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint", "randperm", "linspace", "eye"),
    *("as_tensor", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
)


class _Stream:
    """A stream or event on a device that computes in order: everything is already done."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def record_event(self, *_: Any) -> _Stream:
        return _Stream()

    def _nothing(self, *_: Any) -> None:
        pass

    wait_stream = wait_event = synchronize = record = wait = _nothing


def _cuda_view() -> types.ModuleType:
    view = types.ModuleType("torch.cuda")
    view.__getattr__ = lambda name: getattr(torch.cuda, name)  # type: ignore[method-assign]
    stream = _Stream()
    members: dict[str, Any] = {
        "current_device": lambda: _CPU,
        "device_count": lambda: 1,
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "stream": lambda *_: stream,
        "Stream": _Stream,
        "Event": _Stream,
        "nvtx": types.SimpleNamespace(range_push=lambda *_: None, range_pop=lambda *_: None),
    }
    for name in ("synchronize", "empty_cache", "set_device", "reset_peak_memory_stats"):
        members[name] = lambda *_, **__: None
    members["random"] = types.SimpleNamespace(
        get_rng_state=members["get_rng_state"], set_rng_state=members["set_rng_state"]
    )
    vars(view).update(members)
    return view


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return make


def _torch_view() -> types.ModuleType:
    view = types.ModuleType("torch")
    vars(view).update(vars(torch))
    view.__getattr__ = lambda name: getattr(torch, name)  # type: ignore[method-assign]
    view.cuda = _cuda_view()  # type: ignore[attr-defined]
    for name in _FACTORIES:
        setattr(view, name, _on_cpu(getattr(torch, name)))
    return view


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any, view: types.ModuleType) -> None:
        self.inner, self.view = inner, view

    def create_module(self, spec: Any) -> Any:
        return self.inner.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self.inner.exec_module(module)
        if getattr(module, "torch", None) is torch:
            module.torch = self.view  # type: ignore[attr-defined]
        if module.__name__ in _REPAIRS:
            _REPAIRS[module.__name__](module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self.view = _torch_view()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "megatron.core" and not name.startswith("megatron.core."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader, self.view)
        return spec


def _rewrite_type_names(function: Any) -> None:
    """Rewrite 'torch.cuda.FloatTensor' to 'torch.FloatTensor' in one function that compares ``param.type()``."""
    function = getattr(function, "__func__", function)
    function = getattr(function, "__wrapped__", function)

    def rewritten(constant: Any) -> Any:
        if isinstance(constant, str) and constant.startswith("torch.cuda.") and constant.endswith("Tensor"):
            return constant.replace("torch.cuda.", "torch.")
        if isinstance(constant, tuple | frozenset):
            return type(constant)(rewritten(part) for part in constant)
        return constant

    constants = tuple(rewritten(constant) for constant in function.__code__.co_consts)
    if constants == function.__code__.co_consts:
        raise RuntimeError(f"{function.__qualname__}: no CUDA type names found: this Megatron-core is not 0.16.1")
    function.__code__ = function.__code__.replace(co_consts=constants)


def _repair_distributed_optimizer(module: Any) -> None:
    _rewrite_type_names(module.DistributedOptimizer.__init__)
    _rewrite_type_names(module.DistributedOptimizer.__dict__["_build_model_and_main_param_groups"])


def _repair_optimizer(module: Any) -> None:
    _rewrite_type_names(module.Float16OptimizerWithFloat16Params.__init__)


def _repair_clip_grads(module: Any) -> None:
    _rewrite_type_names(module.clip_grad_by_total_norm_fp32)


def _repair_random(module: Any) -> None:
    module._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    module._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)


_REPAIRS: dict[str, Callable[[Any], None]] = {
    "megatron.core.optimizer.distrib_optimizer": _repair_distributed_optimizer,
    "megatron.core.optimizer.optimizer": _repair_optimizer,
    "megatron.core.optimizer.clip_grads": _repair_clip_grads,
    "megatron.core.tensor_parallel.random": _repair_random,
}


def install() -> None:
    """Make ``megatron.core`` importable and right on a machine without CUDA. Calling it again does nothing.

    Raises:
        RuntimeError: Megatron was imported before, or is not the version whose functions are repaired here.
    """
    if torch.cuda.is_available() or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if any(name.startswith("megatron.core") for name in sys.modules):
        raise RuntimeError("megatron.core was imported before megappo could prepare it for the CPU")
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    sys.meta_path.insert(0, _Finder())
    compile_ = torch.compile
    # Megatron decorates functions with torch.compile as it is imported; on CPU that only costs start-up time.
    torch.compile = lambda model=None, **_: model if model is not None else (lambda f: f)  # type: ignore[assignment]
    try:
        import megatron.core.jit
        import megatron.core.models.gpt
        import megatron.core.optimizer
        import megatron.core.pipeline_parallel

        megatron.core.jit.disable_jit_fuser()
    finally:
        torch.compile = compile_
