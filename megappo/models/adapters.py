"""Low-rank adapters on Megatron's parallel linear layers, the same for its own layers and for Transformer Engine's.

A layer stays what it is, with its weight under its name, and adds ``alpha / rank * B A x`` to its output. What tensor
parallelism has to exchange for that is as narrow as the rank: A is applied before anything is gathered, and B after
everything is summed.

=====================  =====================================  =====================================
layer                  without sequence parallelism           with
=====================  =====================================  =====================================
split by rows          A whole, on all tokens;                A whole, on own tokens (its gradients
(q, k, v, gate, up)    gradients of A x summed                are summed); A x gathered
split by columns       A x summed;                            A x summed and scattered;
(o, down)              B whole, on all tokens                 B whole, on own tokens (likewise)
=====================  =====================================  =====================================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from megappo.models import megatron_cpu
from megappo.models.lora import A, B, Projection, is_trained, projections
from megappo.models.parameters import Parameter, Split
from megappo.models.spec import ModelSpec

megatron_cpu.install()

from megatron.core import tensor_parallel  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint  # noqa: E402


class Adapter(torch.nn.Module):
    """The adapters of one linear layer: those of the projections that are fused in it and are targets."""

    def __init__(self, spec: ModelSpec, fused: Sequence[Projection], config: TransformerConfig, group: Any) -> None:
        """Zeros; see :func:`megappo.reshard.merge.initialise`.

        Args:
            spec: the model, with adapters.
            fused: all projections in the layer, in their order.
            group: the tensor-parallel group.
        """
        super().__init__()
        self.active = True
        assert spec.lora is not None
        self.scale, self.group, tp = spec.lora.scale, group, config.tensor_model_parallel_size
        self.sequence_parallel = config.sequence_parallel
        self.by_columns = fused[0].parameter.split is Split.COLUMNS
        # Megatron's order of fused queries, keys and values is by key/value group.
        self.groups = spec.num_kv_heads // tp if fused[0].parameter.split is Split.QKV else 1
        dims = spec.dims()
        self.widths = {one.name: dims[one.shape[0]] // (1 if self.by_columns else tp) for one in fused}
        factors: dict[str, dict[str, torch.nn.Parameter]] = {A: {}, B: {}}
        for one in fused:
            if one.name in spec.lora.targets:
                for which, factor in zip((A, B), one.factors(), strict=True):
                    shape = [dims[axis] for axis in factor.shapes[0]]
                    axis = {Split.WHOLE: None, Split.COLUMNS: 1}.get(factor.split, 0)
                    factors[which][one.name] = _factor(shape, axis, tp, config)
        self.lora_A, self.lora_B = (torch.nn.ParameterDict(factors[which]) for which in (A, B))

    def forward(self, x_sbi: torch.Tensor) -> torch.Tensor:
        """What is added to the layer's output.

        Args:
            x_sbi: [own tokens, batch, in] for a layer that is split by rows, [all tokens, batch, in / tp] else.
        """
        inner_sbr = self._exchanged(F.linear(x_sbi, torch.cat(list(self.lora_A.values()))) * self.scale)
        names = list(self.lora_A)
        inner = dict(zip(names, inner_sbr.chunk(len(names), dim=-1), strict=True))
        if self.by_columns:
            (name,) = names
            return F.linear(inner[name], self.lora_B[name])
        parts = []
        for name, width in self.widths.items():
            if name in inner:
                part_sbo = F.linear(inner[name], self.lora_B[name])
            else:
                part_sbo = inner_sbr.new_zeros(*inner_sbr.shape[:-1], width)
            parts.append(part_sbo.unflatten(-1, (self.groups, -1)))
        return torch.cat(parts, dim=-1).flatten(-2)

    def _exchanged(self, inner_sbr: torch.Tensor) -> torch.Tensor:
        """What B is applied to, from this rank's part of A x."""
        if self.by_columns:
            if self.sequence_parallel:
                return tensor_parallel.reduce_scatter_to_sequence_parallel_region(inner_sbr, group=self.group)
            return tensor_parallel.reduce_from_tensor_model_parallel_region(inner_sbr, group=self.group)
        if self.sequence_parallel:
            return tensor_parallel.gather_from_sequence_parallel_region(inner_sbr, group=self.group)
        return tensor_parallel.copy_to_tensor_model_parallel_region(inner_sbr, group=self.group)

    def sharded_state_dict(self, prefix: str, sharded_offsets: Any, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Checkpoint entries."""
        state = self.state_dict(prefix="", keep_vars=True)
        axes = {name: param.partition_dim for name, param in state.items() if param.tensor_model_parallel}
        return make_sharded_tensors_for_checkpoint(
            state, prefix, axes, sharded_offsets, tp_group=self.group, dp_cp_group=metadata["dp_cp_group"]
        )


def _factor(shape: list[int], axis: int | None, tp: int, config: TransformerConfig) -> torch.nn.Parameter:
    """This rank's part of a factor, with the marks by which Megatron sums gradients and counts them in norms."""
    if axis is not None:
        shape[axis] //= tp
    factor: Any = torch.nn.Parameter(torch.zeros(shape, dtype=config.params_dtype))
    tensor_parallel.set_tensor_model_parallel_attributes(factor, axis is not None, -1 if axis is None else axis, 1)
    factor.sequence_parallel = config.sequence_parallel and axis is None
    return factor


class _Adapted:
    """Put before a linear layer's own class."""

    adapter: Adapter

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        output, bias, *normed = super().forward(x, *args, **kwargs)  # type: ignore[misc]
        if isinstance(output, tuple):  # of a layer with a norm in it
            output, *normed = output
        return output + self.adapter(normed[0] if normed else x) if self.adapter.active else output, bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        return state | self.adapter.sharded_state_dict(f"{prefix}adapter.", sharded_offsets, metadata or {})


@cache
def _adapted(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    return type(f"Adapted{kind.__name__}", (_Adapted, kind), {})


def add_adapters(model: Any, spec: ModelSpec, group: Any) -> None:
    """Give the layers of a Megatron GPT their adapters.

    Args:
        spec: the model, with adapters.
        group: the tensor-parallel group.
    """
    assert spec.lora is not None
    fused: dict[Parameter, list[Projection]] = {}
    for projection in projections(spec.base.layer):
        fused.setdefault(projection.parameter, []).append(projection)
    for parameter, parts in fused.items():
        if any(one.name in spec.lora.targets for one in parts):
            for layer in model.decoder.layers:
                linear = layer.get_submodule(parameter.megatron.removesuffix(".weight"))
                linear.adapter = Adapter(spec, parts, model.config, group)
                linear.__class__ = _adapted(type(linear))  # type: ignore[arg-type]  # it keeps its place and its parameters' names
                if hasattr(linear, "return_layernorm_output"):  # Transformer Engine's, with the norm in it
                    linear.return_layernorm_output = True
    if model.pre_process:
        # Recomputed layers pass gradients on only if their input asks for them, and the embedding is frozen.
        model.embedding.register_forward_hook(lambda module, args, output: output.requires_grad_())


@contextmanager
def adapters_off(model: torch.nn.Module) -> Iterator[None]:
    """In here a model computes what it would without its adapters."""
    adapters = [module for module in model.modules() if isinstance(module, Adapter)]
    for adapter in adapters:
        adapter.active = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.active = True


def freeze(model: torch.nn.Module, *, scalar_head: bool) -> None:
    """Let nothing train but adapters and a scalar head."""
    for name, param in model.named_parameters():
        param.requires_grad_(is_trained(name, scalar_head=scalar_head))
