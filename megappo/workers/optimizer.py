"""Megatron's data parallelism and distributed optimizer for one role, and repairs for runs without Transformer Engine.

Without Transformer Engine or Apex, Megatron-core 0.16.1 falls back to torch's AdamW and mishandles its per-parameter
``step``, on any device; :func:`_repair_torch_adam` mends that. The CPU has nothing to do with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from megappo.config import OptimizerConfig
from megappo.models import megatron_cpu
from megappo.models.process_groups import ProcessGroupCollection

megatron_cpu.install()

from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig  # noqa: E402
from megatron.core.optimizer import distrib_optimizer, get_megatron_optimizer  # noqa: E402


def make_trainable(
    chunks: Sequence[GPTModel], groups: ProcessGroupCollection, dtype: torch.dtype, settings: OptimizerConfig
) -> tuple[list[DistributedDataParallel], Any]:
    """Wrap the chunks of a model, whose weights are loaded, for training.

    Returns:
        (the wrapped chunks, Megatron's distributed optimizer). Gradients are summed over data-parallel ranks in float32
        and never divided: the loss already holds its weights.
    """
    _repair_torch_adam()
    wrapped = wrap_for_training(chunks, groups)
    config = MegatronOptimizerConfig(
        optimizer="adam",
        lr=0.0,  # set before every step
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        clip_grad=settings.grad_clip,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(config, wrapped, use_gloo_process_groups=False, pg_collection=groups)
    set_hyper_parameters(optimizer, settings)
    if isinstance(distributed(optimizer).optimizer, torch.optim.AdamW):
        make_state(optimizer)  # a state dict taken before the first step is refused otherwise
    chunks[0].config.grad_scale_func = optimizer.scale_loss
    return wrapped, optimizer


def wrap_for_training(chunks: Sequence[GPTModel], groups: ProcessGroupCollection) -> list[DistributedDataParallel]:
    """Move each chunk's weights into one buffer and give them gradients, which backward passes add to."""
    config = chunks[0].config  # all have the same
    config.finalize_model_grads_func = partial(_finalize, groups=groups)
    data_parallel = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=True,
        check_for_nan_in_grad=False,
    )
    return [
        DistributedDataParallel(config=config, ddp_config=data_parallel, module=chunk, pg_collection=groups)
        for chunk in chunks
    ]


def set_hyper_parameters(optimizer: Any, settings: OptimizerConfig) -> None:
    """Use these settings from the next step on."""
    for group in optimizer.param_groups:
        group["betas"], group["eps"] = (settings.beta1, settings.beta2), settings.eps
        # Megatron applies wd_mult only through its own scheduler; without it, norms and biases would decay too.
        group["weight_decay"] = settings.weight_decay * group["wd_mult"]


def set_learning_rate(optimizer: Any, learning_rate: float) -> None:
    """Use this learning rate from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["lr_mult"]


def gradient_buffers(chunks: Iterable[Any]) -> Iterator[torch.Tensor]:
    """What gradients are summed in; nothing for chunks that are not wrapped for training."""
    for chunk in chunks:
        for buffer in chunk.buffers if isinstance(chunk, DistributedDataParallel) else ():
            yield buffer.grad_data


def state_tensors(optimizer: Any, weights: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Main weights and moments on the model's device, but not main weights that are the weights themselves."""
    shared = {weight.untyped_storage().data_ptr() for weight in weights}
    if optimizer is None:
        return
    adam = distributed(optimizer).optimizer
    mains = [param.data for group in adam.param_groups for param in group["params"]]
    moments = [value for state in adam.state.values() for value in state.values()]
    for tensor in (*mains, *moments):
        on_device = torch.is_tensor(tensor) and tensor.is_cuda == torch.cuda.is_available()
        if on_device and tensor.untyped_storage().data_ptr() not in shared:
            yield tensor


def distributed(optimizer: Any) -> Any:
    """The distributed optimizer in Megatron's chain of optimizers: models without experts have one."""
    (only,) = optimizer.chained_optimizers
    return only


def make_state(optimizer: Any) -> None:
    """Have Adam's moments, zeros, where no step has made them yet."""
    part = distributed(optimizer)
    if not isinstance(part.optimizer, torch.optim.AdamW):
        part.init_state_fn(part.optimizer, part.config)
        return
    for group in part.optimizer.param_groups:
        for param in group["params"]:
            if not part.optimizer.state[param]:
                part.optimizer.state[param] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(param.data),
                    "exp_avg_sq": torch.zeros_like(param.data),
                }


def _finalize(models: list[Any], num_tokens: Any = None, *, groups: ProcessGroupCollection, **_: Any) -> None:
    # The token count that Megatron would divide by is left out: see make_trainable.
    finalize_model_grads(models, None, pg_collection=groups)


def _repair_torch_adam() -> None:
    """Make what a distributed optimizer over torch's AdamW has loaded right. Repeatable."""
    cls = distrib_optimizer.DistributedOptimizer
    if distrib_optimizer.HAVE_APEX_OR_TE or getattr(cls, "_megappo_repaired", False):
        return
    load = cls.load_state_dict

    def load_with_own_steps(self: Any, state_dict: dict[str, Any]) -> None:
        load(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                # Megatron gives all parameters one step tensor, which torch then increments once per parameter.
                state["step"] = state["step"].clone()

    cls.load_state_dict = load_with_own_steps
    cls._megappo_repaired = True
