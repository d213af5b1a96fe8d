"""Micro-batches through the stages of a role's pipeline, by Megatron's schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

import megappo.models.process_groups  # noqa: F401 (Megatron is made ready for this machine first)
from megappo.workers.micro_batch import MicroBatch

from megatron.core.pipeline_parallel import get_forward_backward_func  # isort: skip
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator  # isort: skip

Evaluate = Callable[[torch.Tensor, MicroBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""(hidden states, micro-batch) to (loss, what is to be known of it)."""


def through_pipeline(
    chunks: Sequence[torch.nn.Module],
    config: Any,
    groups: Any,
    micros: Sequence[MicroBatch],
    evaluate: Evaluate,
    *,
    forward_only: bool,
) -> list[dict[str, torch.Tensor]]:
    """On the last stage, the second results of ``evaluate``, one per micro-batch; on others, nothing.

    Args:
        chunks: of this stage; several are interleaved.
        config: Megatron's ``TransformerConfig``.
        groups: the role's ``ProcessGroupCollection``.
    """

    def loss(micro: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        value, result = evaluate(output, micro)
        # Even without targets the loss must reach every parameter, or gradient synchronisation would wait for it.
        value = value + 0.0 * output.sum() if micro.rows_n.numel() == 0 else value
        return value, torch.zeros((), dtype=torch.int, device=output.device), result

    def forward(
        pending: Iterator[MicroBatch], model: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
        micro = next(pending)
        output = model(micro.input_ids_1t, micro.position_ids_1t, None, packed_seq_params=micro.packed)
        return output, partial(loss, micro)

    stages, interleaved = groups.pp.size(), len(chunks) > 1
    run = get_forward_backward_func(pp_size=stages, vp_size=len(chunks) if interleaved else None)
    return run(
        forward_step_func=forward,
        data_iterator=[iter(micros) for _ in chunks],
        model=chunks,
        num_microbatches=len(micros),
        seq_length=max(micro.num_tokens for micro in micros),
        micro_batch_size=1,
        forward_only=forward_only,
        pg_collection=groups,
        p2p_communicator=P2PCommunicator(groups.pp, config) if stages > 1 else None,
    )
