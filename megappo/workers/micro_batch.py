"""Rows of the batch as packed tensors on the device: what one forward pass reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch

from megappo.data import batch
from megappo.data.loss_mask import flat_mask, row_counts
from megappo.models.layers import PackedSeqParams
from megappo.ppo.balance import pack_by_budget, unit_rows, unit_sums


@dataclass(frozen=True)
class MicroBatch:
    """Sequences one after the other, without padding between them.

    The last token of a sequence predicts nothing and is left out: a sequence takes prompt + response - 1 places.

    Attributes:
        ids: int64 [sequences], the rows' ids.
        input_ids_1t, position_ids_1t: int64 [1, tokens].
        packed: where each sequence begins, for attention.
        rows_n: int64 [targets], the place whose output predicts each target (and whose hidden state gives the value
            before it).
        targets_n: int64 [targets], the response tokens, or those of them that ``loss_mask`` leaves.
        lengths_b: int64 [sequences], targets of each.
        columns: other per-response-token columns, flat, float32 [targets].
    """

    ids: np.ndarray
    input_ids_1t: torch.Tensor
    position_ids_1t: torch.Tensor
    packed: PackedSeqParams
    rows_n: torch.Tensor
    targets_n: torch.Tensor
    lengths_b: torch.Tensor
    columns: dict[str, torch.Tensor]

    @property
    def num_tokens(self) -> int:
        """Tokens that pass through the model."""
        return self.input_ids_1t.shape[1]


def sequence_lengths(table: pa.Table) -> np.ndarray:
    """Places that each row takes in a micro-batch, int64 [rows]."""
    return batch.lengths(table, "prompt_ids") + batch.lengths(table, "response_ids") - 1


def make_micro_batches(
    table: pa.Table,
    *,
    token_budget: int,
    multiple: int,
    columns: Sequence[str],
    device: torch.device,
    unit: int = 1,
    count_multiple: int = 1,
) -> list[MicroBatch]:
    """Cut rows into micro-batches of at most ``token_budget`` tokens.

    Where there are too few rows for the number of micro-batches (at least one, since every rank of a layout has to take
    part in the collectives of a step), some are of padding, without targets.

    Args:
        table: rows with ``id``, ``prompt_ids``, ``response_ids`` and ``columns``; with ``loss_mask``, response tokens
            where that is 0 are context only.
        multiple: pad the token count of each micro-batch to a multiple of this (the tensor-parallel size under sequence
            parallelism); the padding comes after the last sequence, where causal attention hides it.
        columns: ragged float columns to take along.
        unit: so many rows in a row stay together.
        count_multiple: the number of micro-batches is a multiple of this.

    Raises:
        ValueError: a unit is longer than the budget.
    """
    bins = pack_by_budget(unit_sums(sequence_lengths(table), unit).tolist(), token_budget, count_multiple)
    bins = bins or [[]] * count_multiple
    return [_pack(table.take(pa.array(unit_rows(units, unit))), multiple, columns, device) for units in bins]


def _pack(table: pa.Table, multiple: int, columns: Sequence[str], device: torch.device) -> MicroBatch:
    prompts, responses = batch.split_rows(table, "prompt_ids"), batch.split_rows(table, "response_ids")
    sequences = [np.concatenate(pair)[:-1] for pair in zip(prompts, responses, strict=True)]
    lengths = [len(sequence) for sequence in sequences] or [0]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    rows = [
        np.arange(start + len(prompt) - 1, start + len(prompt) - 1 + len(response))
        for start, prompt, response in zip(starts[:-1], prompts, responses, strict=False)
    ]
    chosen = flat_mask(table, "response_ids")
    padding = -starts[-1] % multiple or (multiple if starts[-1] == 0 else 0)
    lengths[-1] += padding
    starts[-1] += padding
    tokens = np.concatenate([*sequences, np.zeros(padding)]).astype(np.int64)
    positions = np.concatenate([np.arange(length) for length in lengths])

    def tensor(values: np.ndarray, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.as_tensor(values).to(device=device, dtype=dtype, non_blocking=True)

    cumulative = tensor(starts, torch.int32)
    longest = max(lengths)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    return MicroBatch(
        ids=batch.column(table, "id"),
        input_ids_1t=tensor(tokens)[None],
        position_ids_1t=tensor(positions)[None],
        packed=packed,
        rows_n=tensor(np.concatenate([np.empty(0, np.int64), *rows])[chosen]),
        targets_n=tensor(batch.flat(table, "response_ids")[chosen]),
        lengths_b=tensor(row_counts(chosen, batch.lengths(table, "response_ids"))),
        columns={name: tensor(batch.flat(table, name)[chosen], torch.float32) for name in columns},
    )
