"""Log-probabilities and entropies over a split vocabulary, against torch's on the whole one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from megappo.models import vocab_parallel
from megappo.models.parameters import megatron_vocabulary

TOKENS = 23
ROWS = torch.tensor([20, 0, 3, 4, 5, 11, 12, 13, 22, 7, 9])  # some rows, in no order; the others predict nothing
TEMPERATURE = 0.7


def problem(vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Real logits [TOKENS, vocab], targets [rows], and weights of both results in a loss."""
    generator = torch.Generator().manual_seed(vocab)
    logits = 3 * torch.randn(TOKENS, vocab, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, vocab, (len(ROWS),), generator=generator)
    targets[0], targets[1] = 0, vocab - 1
    weights = torch.randn(2, len(ROWS), generator=generator, dtype=torch.float64)
    return logits.to(dtype), targets, weights[0], weights[1]


def expected(vocab: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """By torch in float64, from the logits as rounded to ``dtype``."""
    logits, targets, weight_p, weight_h = problem(vocab, dtype)
    logits = logits.double().requires_grad_()
    distribution = torch.distributions.Categorical(logits=logits[ROWS] / TEMPERATURE)
    logprobs, entropies = distribution.log_prob(targets), distribution.entropy()
    (only_logprobs,) = torch.autograd.grad((weight_p * logprobs).sum(), logits, retain_graph=True)
    (both,) = torch.autograd.grad((weight_p * logprobs + weight_h * entropies).sum(), logits)
    return {
        "logprobs": logprobs.detach(),
        "entropies": entropies.detach(),
        "grad_logprobs": only_logprobs,
        "grad_both": both,
    }


def on_a_rank(vocabs: list[int], dtypes: list[torch.dtype], chunk: int) -> list[dict[str, np.ndarray]]:
    """All combinations on this rank's slice of the padded vocabulary, whose padding holds garbage."""
    import torch.distributed as dist

    vocab_parallel.CHUNK_TOKENS = chunk
    out = []
    for vocab in vocabs:
        for dtype in dtypes:
            logits, targets, weight_p, weight_h = problem(vocab, dtype)
            padded = torch.full((TOKENS, megatron_vocabulary(vocab, dist.get_world_size())), 50.0, dtype=dtype)
            padded[:, :vocab] = logits
            part = padded.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].clone().requires_grad_()

            def evaluate(with_entropy: bool, part: Any = part, targets: Any = targets, vocab: int = vocab) -> Any:
                settings = {"vocab_size": vocab, "temperature": TEMPERATURE, "group": dist.group.WORLD}
                return vocab_parallel.token_logprobs(part, ROWS, targets, **settings, with_entropy=with_entropy)

            logprobs, zeros = evaluate(False)
            (only_logprobs,) = torch.autograd.grad((weight_p * logprobs).sum(), part)
            again, entropies = evaluate(True)
            (both,) = torch.autograd.grad((weight_p * again + weight_h * entropies).sum(), part)
            assert not zeros.any() and torch.equal(again, logprobs)
            found = {"logprobs": logprobs, "entropies": entropies, "grad_logprobs": only_logprobs, "grad_both": both}
            assert all(
                x.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) for x in (logprobs, entropies)
            )
            assert only_logprobs.dtype == both.dtype == dtype
            out.append({name: tensor.detach().double().numpy() for name, tensor in found.items()})
    return out


# 9 real rows over 4 ranks of 8: the third and fourth rank hold padding only. 64 rows over 4 ranks: no padding.
VOCABS = [9, 64, 61]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
ACCURACY = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-6}


# 11 rows: chunks of 4, 4 and 3; one that just fits; one that is not full.
@pytest.mark.parametrize(("tp", "chunk"), [(1, 4), (2, 4), (2, 11), (2, 1024), (4, 4), (4, 1024)])
def test_equal_to_torch(tp: int, chunk: int) -> None:
    results = run_ranks(tp, on_a_rank, VOCABS, DTYPES, chunk)
    cases = [(vocab, dtype) for vocab in VOCABS for dtype in DTYPES]
    for case, (vocab, dtype) in enumerate(cases):
        wanted, parts = expected(vocab, dtype), [result[case] for result in results]
        for name in ("logprobs", "entropies"):
            for part in parts:
                np.testing.assert_allclose(part[name], wanted[name], atol=ACCURACY[dtype], rtol=0)
        for name in ("grad_logprobs", "grad_both"):
            whole = np.concatenate([part[name] for part in parts], axis=1)
            assert not whole[:, vocab:].any()  # padding gets no gradient
            # The gradient is computed in float32 and rounded once, to the logits' own dtype.
            rounding = 2**-8 if dtype == torch.bfloat16 else 0
            np.testing.assert_allclose(whole[:, :vocab], wanted[name], atol=2 * ACCURACY[dtype], rtol=rounding)


class Alone:
    """A tensor-parallel group of one."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def alone(logits: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor, **settings: Any) -> Any:
    given = {"vocab_size": logits.shape[1], "temperature": 1.3, "group": Alone(), "with_entropy": True, **settings}
    return vocab_parallel.token_logprobs(logits, rows, targets, **given)


def test_gradient_by_finite_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocab_parallel, "CHUNK_TOKENS", 2)
    logits = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    rows, targets = torch.tensor([3, 0, 1]), torch.tensor([4, 0, 2])
    assert torch.autograd.gradcheck(lambda x: alone(x, rows, targets, vocab_size=5), (logits,))


def test_large_logits_lose_no_digits() -> None:
    logits = torch.tensor([[3e4, 3e4, -3e4]], requires_grad=True)
    logprobs, entropies = alone(logits, torch.tensor([0]), torch.tensor([1]), temperature=1.0)
    (gradient,) = torch.autograd.grad(logprobs.sum(), logits)
    torch.testing.assert_close(gradient, torch.tensor([[-0.5, 0.5, 0.0]]))
    torch.testing.assert_close(logprobs, -torch.tensor([2.0]).log())
    torch.testing.assert_close(
        entropies, torch.tensor([2.0]).log(), atol=4e-3, rtol=0
    )  # float32 at 3e4 has steps of 2e-3


def test_nothing_to_evaluate() -> None:
    logits = torch.randn(4, 6, requires_grad=True)
    none = torch.empty(0, dtype=torch.int64)
    logprobs, entropies = alone(logits, none, none)
    assert logprobs.shape == entropies.shape == (0,)
    (logprobs.sum() + entropies.sum()).backward()
    assert logits.grad is not None and not logits.grad.any()


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor of a dtype wider than bfloat16 that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.dtype in (torch.float32, torch.float64):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_no_float32_copy_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocab_parallel, "CHUNK_TOKENS", 8)
    logits = torch.randn(64, 128).bfloat16().requires_grad_()
    rows, targets = torch.arange(64), torch.arange(64)
    with Largest() as seen:
        logprobs, entropies = alone(logits, rows, targets)
    with Largest() as seen_backward:
        (logprobs.sum() + entropies.sum()).backward()
    assert seen.elements == seen_backward.elements == 8 * 128
