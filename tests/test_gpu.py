"""What runs only on CUDA, held against its torch or float32 twin."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megappo.models import softmax_torch
from megappo.models.language_head import LanguageHead

pytestmark = pytest.mark.gpu


class Alone:
    """A tensor-parallel group of one."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("columns", "temperature"), [(7, 1.0), (4096, 0.7), (50_001, 1.3)])
def test_softmax_kernels_equal_torch(dtype: torch.dtype, columns: int, temperature: float) -> None:
    from megappo.models import softmax_cuda

    generator = torch.Generator("cuda").manual_seed(columns)
    logits = (3 * torch.randn(33, columns, generator=generator, device="cuda")).to(dtype)
    targets = torch.randint(-1, columns + 3, (33,), generator=generator, device="cuda")
    found = softmax_cuda.softmax_statistics(logits, targets, temperature)
    wanted = softmax_torch.softmax_statistics(logits.double(), targets, temperature)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.double(), want, atol=2e-4, rtol=2e-5)
    log_sums = wanted[1][:, 0].log()
    entropies = log_sums - wanted[1][:, 2] / wanted[1][:, 0]
    slopes = torch.randn(2, 33, generator=generator, device="cuda")
    for grad_entropies in (None, slopes[1]):
        arguments = (targets, wanted[0], log_sums, entropies, slopes[0], grad_entropies)
        single = [x if x is None or x.dtype == torch.int64 else x.float() for x in arguments]
        got = softmax_cuda.logit_gradients_(logits.clone(), *single, temperature)
        double = [x if x is None or x.dtype == torch.int64 else x.double() for x in arguments]
        want = softmax_torch.logit_gradients_(logits.double(), *double, temperature)
        torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=8e-3 if dtype == torch.bfloat16 else 1e-4)


def test_head_of_a_large_vocabulary_needs_little_memory() -> None:
    """32k tokens x 152k vocabulary: under 3 GiB beyond weights, their gradients and the hidden states."""
    weight = torch.randn(152_064, 896, device="cuda", dtype=torch.bfloat16).mul_(0.02).requires_grad_()
    weight.main_grad = torch.zeros(weight.shape, device="cuda")  # type: ignore[attr-defined]
    hidden = torch.randn(32_768, 896, device="cuda", dtype=torch.bfloat16).requires_grad_()
    targets = torch.randint(0, 152_064, (32_768,), device="cuda")

    def function(logprobs_c: torch.Tensor, entropies_c: torch.Tensor, which: slice) -> tuple[torch.Tensor, Any]:
        return -logprobs_c.sum() - 0.01 * entropies_c.sum(), {}

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss, _ = LanguageHead(weight, 152_064, Alone()).loss(hidden, targets, function, temperature=1.0)  # type: ignore[arg-type]
    loss.backward()
    extra = (torch.cuda.max_memory_allocated() - before) / 2**30
    print(f"peak beyond weights, gradients and hidden states: {extra:.2f} GiB")
    assert extra < 3.0
    assert torch.isfinite(loss) and hidden.grad is not None and weight.main_grad.abs().sum() > 0
