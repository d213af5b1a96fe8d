"""What plain torch computes, by transformers: against it, one sees how much rounding alone does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from megappo.data import batch


@torch.no_grad()
def plain_logprobs(model: str | Path, rows: pa.Table, dtype: torch.dtype, device: str) -> list[np.ndarray]:
    """Log-probabilities of each row's response, row by row, in nats; the softmax in float32, as ours."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device)
    found = []
    for prompt, response in zip(
        batch.split_rows(rows, "prompt_ids"), batch.split_rows(rows, "response_ids"), strict=True
    ):
        ids = torch.tensor(np.concatenate([prompt, response])).long().to(device)
        logits = network(ids[None]).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        found.append(logits.gather(1, ids[len(prompt) :, None])[:, 0].cpu().numpy())
    return found
