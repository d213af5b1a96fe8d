"""What training on given responses minimises: a loss on pairs for reward models, and on tokens for policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn.functional import logsigmoid

from megappo.models.language_head import Statistics
from megappo.workers.objectives import Policy
from megappo.workers.settings import Totals

if TYPE_CHECKING:  # the driver makes objectives too, and imports no Megatron
    from megappo.workers.micro_batch import MicroBatch


@dataclass(frozen=True)
class PairObjective:
    """Bradley-Terry on pairs, -log sigmoid(r(chosen) - r(rejected) - margin), averaged over pairs.

    Ouyang et al. (arXiv:2203.02155), equation 1; the margin as in Touvron et al. (arXiv:2307.09288), equation 2. Rows
    come in pairs, the chosen one first, each with one target (see :func:`megappo.data.sequences.ending_rows`).
    """

    columns: ClassVar[tuple[str, ...]] = ("margin",)
    unit: ClassVar[int] = 2

    def __call__(
        self, output_t1: torch.Tensor, micro: MicroBatch, totals: Totals, policy: Policy
    ) -> tuple[torch.Tensor, Statistics]:
        scores_p2 = output_t1[micro.rows_n, 0].view(-1, 2)
        gaps_p, margins_p = scores_p2[:, 0] - scores_p2[:, 1], micro.columns["margin"].view(-1, 2)[:, 0]
        pairs = max(totals.rows // 2, 1)
        loss = -logsigmoid(gaps_p - margins_p).sum() / pairs
        measured = {"loss": loss, "accuracy": (gaps_p > 0).float().sum() / pairs, "gap": gaps_p.sum() / pairs}
        return loss, {f"train/{name}": value.detach() for name, value in measured.items()}


@dataclass(frozen=True)
class ResponseObjective:
    """Negative log-likelihood of the response's tokens, averaged over all of the mini-batch's."""

    columns: ClassVar[tuple[str, ...]] = ()
    unit: ClassVar[int] = 1

    def __call__(
        self, output_th: torch.Tensor, micro: MicroBatch, totals: Totals, policy: Policy
    ) -> tuple[torch.Tensor, Statistics]:
        tokens = max(totals.tokens, 1)

        def loss(logprobs_c: torch.Tensor, entropies_c: torch.Tensor, which: slice) -> tuple[torch.Tensor, Statistics]:
            value = -logprobs_c.sum() / tokens
            return value, {"train/loss": value.detach(), "train/entropy": entropies_c.detach().sum() / tokens}

        return policy.head.loss(output_th[micro.rows_n], micro.targets_n, loss, temperature=1.0)
