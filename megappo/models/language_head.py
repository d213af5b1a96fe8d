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

CHUNK_BYTES = 512 << 20
"""Size of the float32 logits of one chunk. A few such tensors exist at a time."""

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
        empty = hidden_nh.new_empty(0, dtype=_wide(hidden_nh.dtype))
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
            nothing = hidden_nh.new_empty(0, dtype=_wide(hidden_nh.dtype))
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
    """Some tokens' logits, in float32 and shifted by their peak, and what follows from them."""

    def __init__(
        self, head: LanguageHead, which: slice, hidden_ch: torch.Tensor, targets_c: torch.Tensor, temperature: float
    ) -> None:
        width, alone = head.weight_vh.shape[0], head.group.size() == 1
        first = head.group.rank() * width
        valid = min(max(head.vocab_size - first, 0), width)
        self.which, self.temperature, self.valid, self.width = which, temperature, valid, width
        z_cv = (hidden_ch @ head.weight_vh[:valid].T).to(_wide(hidden_ch.dtype))
        if temperature != 1.0:
            z_cv /= temperature
        peak_c = z_cv.max(dim=1).values if valid else z_cv.new_full((len(targets_c),), -torch.inf)
        if not alone:
            dist.all_reduce(peak_c, op=dist.ReduceOp.MAX, group=head.group)
        z_cv -= peak_c[:, None]  # sums of shifted logits keep their digits, however large the logits are
        local_c = targets_c - first
        self.here_c = (local_c >= 0) & (local_c < valid)
        self.local_c = local_c.clamp(0, max(valid - 1, 0))
        at_target_c = z_cv.gather(1, self.local_c[:, None])[:, 0] if valid else torch.zeros_like(peak_c)
        e_cv = z_cv.exp()
        sums = torch.stack([e_cv.sum(1), torch.where(self.here_c, at_target_c, 0.0), torch.linalg.vecdot(e_cv, z_cv)])
        del e_cv
        if not alone:
            dist.all_reduce(sums, group=head.group)
        log_sum_c = sums[0].log()
        self.logprobs_c = sums[1] - log_sum_c
        self.entropies_c = log_sum_c - sums[2] / sums[0]
        self.log_p_cv = z_cv.sub_(log_sum_c[:, None])

    def logit_gradients(self, grad_logprobs_c: torch.Tensor, grad_entropies_c: torch.Tensor | None) -> torch.Tensor:
        """Gradient of a loss with respect to this rank's logits, [chunk, real rows]; uses up the chunk."""
        log_p_cv = self.log_p_cv
        if grad_entropies_c is None:
            grad_cv = log_p_cv.exp_().mul_(-grad_logprobs_c[:, None])
        else:
            p_cv = log_p_cv.exp()
            inner_cv = log_p_cv.add_(self.entropies_c[:, None]).mul_(grad_entropies_c[:, None])
            grad_cv = inner_cv.add_(grad_logprobs_c[:, None]).mul_(p_cv).neg_()
        if self.valid:
            grad_cv.scatter_add_(1, self.local_c[:, None], (grad_logprobs_c * self.here_c)[:, None])
        return grad_cv if self.temperature == 1.0 else grad_cv.div_(self.temperature)


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
        total = hidden_nh.new_zeros((), dtype=_wide(hidden_nh.dtype))
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
            grad_cv = chunk.logit_gradients(grad_logprobs_c, grads[1]).to(weight_vh.dtype)
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


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
