"""The language-model head: log-probabilities, entropies and losses of tokens without ever holding their logits.

The output projection is fused with what is done to its result, a chunk of tokens at a time. A training loss takes the
gradients of its chunk right there, in the forward pass, while the logits exist: nothing is kept but the gradient of the
hidden states, and nothing is computed twice. Each rank of a tensor-parallel group holds a slice of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megappo.models import softmax_torch
from megappo.models.softmax_torch import wide

CHUNK_BYTES = 512 << 20
"""Size of one chunk's logits in float32; on CUDA they exist in the model's dtype only."""

Statistics = dict[str, torch.Tensor]
LossFunction = Callable[[torch.Tensor, torch.Tensor, slice], tuple[torch.Tensor, Statistics]]
"""(logprobs_c, entropies_c, which tokens) -> (loss, statistics), both to add up; differentiable in the first two."""


@dataclass(frozen=True)
class LanguageHead:
    """This rank's part of the head.

    Attributes:
        weight_vh: [padded vocabulary / tp, hidden]; padding rows are left out of the softmax. If it has a ``main_grad``
            (Megatron's float32 gradient buffer), gradients are added to that.
        vocab_size: real size of the whole vocabulary.
        group: the tensor-parallel group.
    """

    weight_vh: torch.Tensor
    vocab_size: int
    group: dist.ProcessGroup

    def logprobs(
        self, hidden_nh: torch.Tensor, targets_n: torch.Tensor, *, temperature: float, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """log softmax(logits / temperature) at the targets, and the entropy of that distribution, without gradients.

        Args:
            hidden_nh: [n, hidden], equal on all ranks of the group.
            targets_n: int64 [n], a token id for each.
            temperature: divisor of the logits, > 0.
            with_entropy: compute entropies; else they come back as zeros.

        Returns:
            (logprobs_n, entropies_n) in float32 (float64 for float64 input), in nats, equal on all ranks of the group.
        """
        with torch.no_grad():
            chunks = [
                (chunk.logprobs_c, chunk.entropies_c if with_entropy else torch.zeros_like(chunk.logprobs_c))
                for chunk in self._chunks(hidden_nh, targets_n, temperature)
            ]
        empty = hidden_nh.new_empty(0, dtype=wide(hidden_nh.dtype))
        return (
            torch.cat([empty, *(logprobs for logprobs, _ in chunks)]),
            torch.cat([empty, *(entropies for _, entropies in chunks)]),
        )

    def loss(
        self, hidden_nh: torch.Tensor, targets_n: torch.Tensor, function: LossFunction, *, temperature: float
    ) -> tuple[torch.Tensor, Statistics]:
        """The sum of ``function`` over all tokens, differentiable in the hidden states and the head's weight.

        The gradient of the weight is taken for a loss that is not scaled any further, as ours never is.

        Args:
            hidden_nh: [n, hidden], equal on all ranks of the group; its gradient is this rank's vocabulary's part.
            function: called once per chunk.

        Returns:
            (loss, summed statistics), scalars.
        """
        if len(targets_n) == 0:
            nothing = hidden_nh.new_empty(0, dtype=wide(hidden_nh.dtype))
            return function(nothing, nothing, slice(0, 0))
        statistics: Statistics = {}
        loss = _FusedLoss.apply(hidden_nh, self.weight_vh, targets_n, self, function, temperature, statistics)
        return loss, statistics

    def _chunks(self, hidden_nh: torch.Tensor, targets_n: torch.Tensor, temperature: float) -> Iterator[_Chunk]:
        width = self.weight_vh.shape[0]
        size = max(CHUNK_BYTES // (4 * width), 1)
        for begin in range(0, len(targets_n), size):
            which = slice(begin, min(begin + size, len(targets_n)))
            yield _Chunk(self, which, hidden_nh[which], targets_n[which], temperature)


class _Chunk:
    """Some tokens' logits, in the model's dtype, and what follows from them."""

    def __init__(
        self, head: LanguageHead, which: slice, hidden_ch: torch.Tensor, targets_c: torch.Tensor, temperature: float
    ) -> None:
        width = head.weight_vh.shape[0]
        first = head.group.rank() * width
        self.valid = min(max(head.vocab_size - first, 0), width)
        self.which, self.temperature = which, temperature
        self.targets_c = torch.where(targets_c - first < self.valid, targets_c - first, -1)
        self.softmax = _softmax(hidden_ch)
        self.logits_cv = hidden_ch @ head.weight_vh[: self.valid].T
        self.peaks_c, sums_c3 = self.softmax.softmax_statistics(self.logits_cv, self.targets_c, temperature)
        total_c, at_target_c, weighted_c = sums_c3.unbind(1)
        if head.group.size() > 1:
            own_c = self.peaks_c.clone()
            dist.all_reduce(self.peaks_c, op=dist.ReduceOp.MAX, group=head.group)
            lowered_c = own_c - self.peaks_c
            scale_c = lowered_c.exp()  # 0 on a rank that holds padding only
            weighted_c = torch.where(scale_c > 0, scale_c * (weighted_c + lowered_c * total_c), 0.0)
            sums_3c = torch.stack([scale_c * total_c, at_target_c, weighted_c])
            dist.all_reduce(sums_3c, group=head.group)
            total_c, at_target_c, weighted_c = sums_3c.unbind(0)
        self.log_sums_c = total_c.log()
        # In this order: a large peak would swallow the digits of the sum.
        self.logprobs_c = (at_target_c - self.peaks_c) - self.log_sums_c
        self.entropies_c = self.log_sums_c - weighted_c / total_c

    def logit_gradients(self, grad_logprobs_c: torch.Tensor, grad_entropies_c: torch.Tensor | None) -> torch.Tensor:
        """Gradient of a loss with respect to this rank's logits, [chunk, real rows]; takes the logits' place."""
        return self.softmax.logit_gradients_(
            self.logits_cv,
            self.targets_c,
            self.peaks_c,
            self.log_sums_c,
            self.entropies_c,
            grad_logprobs_c,
            grad_entropies_c,
            self.temperature,
        )


def _softmax(tensor: torch.Tensor) -> Any:
    """The module with the two passes over logits, for this tensor's device."""
    if tensor.is_cuda:
        from megappo.models import softmax_cuda

        return softmax_cuda
    return softmax_torch


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_nh: torch.Tensor,
        weight_vh: torch.Tensor,
        targets_n: torch.Tensor,
        head: LanguageHead,
        function: LossFunction,
        temperature: float,
        statistics: Statistics,
    ) -> torch.Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        total = hidden_nh.new_zeros((), dtype=wide(hidden_nh.dtype))
        grad_nh = torch.zeros_like(hidden_nh) if needs_hidden else None
        main_grad_vh = getattr(weight_vh, "main_grad", None) if needs_weight else None
        grad_vh = torch.zeros_like(weight_vh) if needs_weight and main_grad_vh is None else None
        for chunk in head._chunks(hidden_nh, targets_n, temperature):
            with torch.enable_grad():
                logprobs_c = chunk.logprobs_c.detach().requires_grad_()
                entropies_c = chunk.entropies_c.detach().requires_grad_()
                loss, sums = function(logprobs_c, entropies_c, chunk.which)
                inputs = (logprobs_c, entropies_c)
                grads = torch.autograd.grad(loss, inputs, allow_unused=True) if needs_hidden or needs_weight else None
            total += loss.detach()
            for name, value in sums.items():
                statistics[name] = statistics[name] + value.detach() if name in statistics else value.detach()
            if grads is None:
                continue
            grad_logprobs_c = torch.zeros_like(logprobs_c) if grads[0] is None else grads[0]
            grad_cv = chunk.logit_gradients(grad_logprobs_c, grads[1])
            if grad_nh is not None:
                grad_nh[chunk.which] = grad_cv @ weight_vh[: chunk.valid]
            into = grad_vh if main_grad_vh is None else main_grad_vh
            if into is not None:
                into[: chunk.valid] += grad_cv.T @ hidden_nh[chunk.which]
        ctx.save_for_backward(grad_nh, grad_vh)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        grad_nh, grad_vh = ctx.saved_tensors
        scaled = [None if grad is None else grad * grads[0].to(grad.dtype) for grad in (grad_nh, grad_vh)]
        return (*scaled, None, None, None, None, None)
