"""Log-probabilities, entropies and fused losses over a split vocabulary, against torch's on the whole one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from megappo.models import language_head
from megappo.models.language_head import LanguageHead
from megappo.models.parameters import megatron_vocabulary

pytestmark = pytest.mark.ranks

TOKENS, HIDDEN = 11, 12
TEMPERATURE = 0.7


def problem(vocab: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Hidden states, the real head, targets, and weights of both results in a loss."""
    generator = torch.Generator().manual_seed(vocab)
    targets = torch.randint(0, vocab, (TOKENS,), generator=generator)
    targets[0], targets[1] = 0, vocab - 1
    return {
        "hidden": torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype),
        "weight": torch.randn(vocab, HIDDEN, generator=generator, dtype=torch.float64).to(dtype),
        "targets": targets,
        "of_logprobs": torch.randn(TOKENS, generator=generator, dtype=torch.float64),
        "of_entropies": torch.randn(TOKENS, generator=generator, dtype=torch.float64),
    }


def expected(vocab: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """By torch in float64; logits rounded to ``dtype``, as a matrix product in it rounds them."""
    given = problem(vocab, dtype)
    hidden, weight = (given[name].double().requires_grad_() for name in ("hidden", "weight"))
    exact = hidden @ weight.T
    logits = exact + ((given["hidden"] @ given["weight"].T).double() - exact).detach()
    distribution = torch.distributions.Categorical(logits=logits / TEMPERATURE)
    logprobs, entropies = distribution.log_prob(given["targets"]), distribution.entropy()
    out = {"logprobs": logprobs.detach(), "entropies": entropies.detach()}
    for name, with_entropy in (("only", False), ("both", True)):
        loss = (given["of_logprobs"] * logprobs).sum() + with_entropy * (given["of_entropies"] * entropies).sum()
        out[f"loss_{name}"] = loss.detach()
        out[f"hidden_{name}"], out[f"weight_{name}"] = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    return out


def evaluate(head: LanguageHead, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Everything that :func:`expected` has, from one rank."""
    logprobs, entropies = head.logprobs(given["hidden"], given["targets"], temperature=TEMPERATURE, with_entropy=True)
    out = {"logprobs": logprobs, "entropies": entropies}
    for name, with_entropy in (("only", False), ("both", True)):

        def function(
            logprobs_c: torch.Tensor, entropies_c: torch.Tensor, which: slice, with_entropy: bool = with_entropy
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss = (given["of_logprobs"][which].to(logprobs_c.dtype) * logprobs_c).sum()
            if with_entropy:
                loss = loss + (given["of_entropies"][which].to(logprobs_c.dtype) * entropies_c).sum()
            return loss, {"tokens": torch.tensor(float(len(logprobs_c)))}

        hidden = given["hidden"].clone().requires_grad_()
        loss, sums = head.loss(hidden, given["targets"], function, temperature=TEMPERATURE)
        assert sums["tokens"] == TOKENS
        out[f"loss_{name}"] = loss.detach()
        out[f"hidden_{name}"], out[f"weight_{name}"] = torch.autograd.grad(loss, (hidden, head.weight_vh))
    return out


def on_a_rank(vocabs: list[int], dtypes: list[torch.dtype], chunk_tokens: int) -> list[dict[str, np.ndarray]]:
    """All combinations on this rank's slice of the padded vocabulary, whose padding holds garbage."""
    import torch.distributed as dist

    out = []
    for vocab in vocabs:
        for dtype in dtypes:
            given = problem(vocab, dtype)
            padded = torch.full((megatron_vocabulary(vocab, dist.get_world_size()), HIDDEN), 50.0, dtype=dtype)
            padded[:vocab] = given["weight"]
            part = padded.chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_()
            language_head.CHUNK_BYTES = 4 * part.shape[0] * chunk_tokens
            found = evaluate(LanguageHead(part, vocab, dist.group.WORLD), given)
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            assert found["logprobs"].dtype == found["entropies"].dtype == wide
            assert found["hidden_both"].dtype == found["weight_both"].dtype == dtype
            out.append({name: tensor.double().numpy() for name, tensor in found.items()})
    return out


# 9 real rows over 4 ranks of 8: the third and fourth rank hold padding only. 64 rows over 4 ranks: no padding.
VOCABS = [9, 64, 61]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
ACCURACY = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-5}


# 11 tokens: chunks of 4, 4 and 3; one that just fits; one that is not full.
@pytest.mark.parametrize(("tp", "chunk_tokens"), [(1, 4), (2, 4), (2, 11), (4, 4), (4, 1024)])
def test_equal_to_torch(tp: int, chunk_tokens: int) -> None:
    results = run_ranks(tp, on_a_rank, VOCABS, DTYPES, chunk_tokens)
    cases = [(vocab, dtype) for vocab in VOCABS for dtype in DTYPES]
    for case, (vocab, dtype) in enumerate(cases):
        wanted, parts = expected(vocab, dtype), [result[case] for result in results]
        for name in ("logprobs", "entropies", "loss_only", "loss_both"):
            for part in parts:
                np.testing.assert_allclose(part[name], wanted[name], atol=ACCURACY[dtype], rtol=1e-5)
        # Gradients of logits are computed in float32 and rounded to the model's dtype for the matrix products.
        rounding = {"atol": 0.15, "rtol": 0.05} if dtype == torch.bfloat16 else {"atol": 4 * ACCURACY[dtype]}
        for name in ("only", "both"):
            hidden = sum(part[f"hidden_{name}"] for part in parts)
            np.testing.assert_allclose(hidden, wanted[f"hidden_{name}"], **rounding)
            weight = np.concatenate([part[f"weight_{name}"] for part in parts])
            assert not weight[vocab:].any()  # padding gets no gradient
            np.testing.assert_allclose(weight[:vocab], wanted[f"weight_{name}"], **rounding)


class Alone:
    """A tensor-parallel group of one."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def plain(logprobs_c: torch.Tensor, entropies_c: torch.Tensor, which: slice) -> tuple[torch.Tensor, dict[str, Any]]:
    return (logprobs_c.square() + logprobs_c * entropies_c).sum(), {}


def test_gradient_by_finite_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language_head, "CHUNK_BYTES", 4 * 8 * 2)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(8, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    targets = torch.tensor([4, 0, 2])

    def loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return LanguageHead(weight, 5, Alone()).loss(hidden, targets, plain, temperature=1.3)[0]  # type: ignore[arg-type]

    assert torch.autograd.gradcheck(loss, (hidden, weight))


def test_a_gradient_buffer_is_added_to() -> None:
    given = problem(64, torch.float32)
    wanted = expected(64, torch.float32)
    weight = given["weight"].clone().requires_grad_()
    weight.main_grad = torch.ones(64, HIDDEN)  # type: ignore[attr-defined]
    hidden = given["hidden"].clone().requires_grad_()

    def function(logprobs_c: torch.Tensor, entropies_c: torch.Tensor, which: slice) -> Any:
        return (given["of_logprobs"][which].float() * logprobs_c).sum(), {}

    loss, _ = LanguageHead(weight, 64, Alone()).loss(hidden, given["targets"], function, temperature=TEMPERATURE)  # type: ignore[arg-type]
    loss.backward()
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad - 1, wanted["weight_only"].float(), atol=1e-4, rtol=1e-4)


def test_large_logits_lose_no_digits() -> None:
    head = LanguageHead(torch.tensor([[3e4], [3e4], [-3e4]]), 3, Alone())  # type: ignore[arg-type]
    logprobs, entropies = head.logprobs(torch.ones(1, 1), torch.tensor([1]), temperature=1.0, with_entropy=True)
    torch.testing.assert_close(logprobs, -torch.tensor([2.0]).log())
    torch.testing.assert_close(entropies, torch.tensor([2.0]).log())


def test_nothing_to_evaluate() -> None:
    head = LanguageHead(torch.randn(8, 4, requires_grad=True), 6, Alone())  # type: ignore[arg-type]
    none, hidden = torch.empty(0, dtype=torch.int64), torch.empty(0, 4)
    logprobs, entropies = head.logprobs(hidden, none, temperature=1.0, with_entropy=True)
    assert logprobs.shape == entropies.shape == (0,)
    loss, _ = head.loss(hidden, none, plain, temperature=1.0)
    assert loss == 0


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_logits_exist_a_chunk_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language_head, "CHUNK_BYTES", 4 * 128 * 8)
    head = LanguageHead(torch.randn(128, 4).bfloat16().requires_grad_(), 128, Alone())  # type: ignore[arg-type]
    hidden, targets = torch.randn(64, 4).bfloat16().requires_grad_(), torch.arange(64)
    with Largest() as seen:
        head.loss(hidden, targets, plain, temperature=1.0)[0].backward()
    assert seen.elements == 8 * 128
