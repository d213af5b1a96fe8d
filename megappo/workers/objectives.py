"""What a training step minimises: the actor's and the critic's loss on one micro-batch, with their statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

from megappo.config import PPOConfig
from megappo.models.language_head import LanguageHead, Statistics
from megappo.ppo.kl import kl_estimate
from megappo.ppo.losses import aggregation_weights, value_loss
from megappo.ppo.policy_losses import Stats, cispo_loss, gspo_loss, ppo_loss, sequence_log_ratio
from megappo.workers.settings import Totals

if TYPE_CHECKING:  # the driver makes objectives too, and imports no Megatron
    from megappo.workers.micro_batch import MicroBatch


class Policy(Protocol):
    """A role that has a language-model head on its last stage."""

    @property
    def head(self) -> LanguageHead: ...


class Objective(Protocol):
    """A loss that sums over micro-batches and ranks to the loss of the mini-batch."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Per-token columns of the batch that the loss reads."""
        ...

    @property
    def unit(self) -> int:
        """So many rows in a row belong together, and stay in one micro-batch."""
        ...

    def __call__(
        self, output: torch.Tensor, micro: MicroBatch, totals: Totals, policy: Policy, /
    ) -> tuple[torch.Tensor, Statistics]:
        """(loss to add up, statistics to add up), all scalars; ``output`` is the last stage's."""
        ...


@dataclass(frozen=True)
class ActorObjective:
    """The policy's loss, less an entropy bonus, plus a KL loss where configured."""

    ppo: PPOConfig
    temperature: float
    unit: ClassVar[int] = 1

    @property
    def columns(self) -> tuple[str, ...]:
        kl = ("ref_logprobs",) if self.ppo.kl.loss_coef else ()
        correction = ("correction",) if self.ppo.correction_level != "off" else ()
        return ("logprobs", "advantages", *kl, *correction)

    def __call__(
        self, output_th: torch.Tensor, micro: MicroBatch, totals: Totals, policy: Policy
    ) -> tuple[torch.Tensor, Statistics]:
        weights_n = _token_weights(micro, totals, self.ppo.aggregation)
        hidden_nh, columns = output_th[micro.rows_n], dict(micro.columns)
        if self.ppo.loss == "gspo":
            # A sequence's ratio takes all of its tokens, while the loss sees a chunk of them at a time: so they pass
            # through the head (and the head only) once before.
            logprobs_n, _ = policy.head.logprobs(
                hidden_nh, micro.targets_n, temperature=self.temperature, with_entropy=False
            )
            columns["sequence_log_ratio"] = sequence_log_ratio(logprobs_n - columns["logprobs"], micro.lengths_b)

        def loss(logprobs_c: torch.Tensor, entropies_c: torch.Tensor, which: slice) -> tuple[torch.Tensor, Statistics]:
            data = {name: values_n[which] for name, values_n in columns.items()}
            return self._loss(logprobs_c, entropies_c, data, weights_n[which], totals)

        return policy.head.loss(hidden_nh, micro.targets_n, loss, temperature=self.temperature)

    def _loss(
        self,
        logprobs_n: torch.Tensor,
        entropies_n: torch.Tensor,
        data: dict[str, torch.Tensor],
        weights_n: torch.Tensor,
        totals: Totals,
    ) -> tuple[torch.Tensor, Statistics]:
        ppo = self.ppo
        surrogate_n, stats = self._surrogate(logprobs_n, data)
        if "correction" in data:
            surrogate_n = data["correction"] * surrogate_n
        loss_n, losses = surrogate_n, {"actor/pg_loss": surrogate_n}
        measured = {
            "actor/pg_clipfrac": stats["clipped"],
            "actor/pg_clipfrac_lower": stats["clipped_lower"],
            "actor/ppo_kl": stats["approx_kl"],
            "actor/ratio": stats["ratio"],
            "actor/entropy": entropies_n,
        }
        if "correction" in data:
            measured["training/correction_mean"] = data["correction"]
            measured["training/correction_truncated"] = (data["correction"] >= ppo.correction.threshold).float()
        if ppo.entropy_coef:
            loss_n = loss_n - ppo.entropy_coef * entropies_n
        if ppo.kl.loss_coef:
            kl_n = kl_estimate(logprobs_n, data["ref_logprobs"], ppo.kl.loss_estimator)
            loss_n = loss_n + ppo.kl.loss_coef * kl_n
            losses["actor/kl_loss"] = kl_n
        sums = {**_sums(losses, weights_n), **_means(measured, totals)}
        return (weights_n * loss_n).sum(), sums

    def _surrogate(self, logprobs_n: torch.Tensor, data: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Stats]:
        ppo, old_n, advantages_n = self.ppo, data["logprobs"], data["advantages"]
        low, high = ppo.clip, ppo.clip if ppo.clip_high is None else ppo.clip_high
        if ppo.loss == "gspo":
            ratio_n = data["sequence_log_ratio"]
            return gspo_loss(logprobs_n, old_n, advantages_n, ratio_n, clip_low=low, clip_high=high)
        if ppo.loss == "cispo":
            return cispo_loss(logprobs_n, old_n, advantages_n, clip_low=low, clip_high=high)
        return ppo_loss(logprobs_n, old_n, advantages_n, clip_low=low, clip_high=high, dual_clip=ppo.dual_clip)


@dataclass(frozen=True)
class CriticObjective:
    """Clipped squared error of the values."""

    ppo: PPOConfig
    unit: ClassVar[int] = 1

    @property
    def columns(self) -> tuple[str, ...]:
        return ("values", "returns")

    def __call__(
        self, output_t1: torch.Tensor, micro: MicroBatch, totals: Totals, policy: Policy
    ) -> tuple[torch.Tensor, Statistics]:
        values_n = output_t1[micro.rows_n, 0]
        loss_n, stats = value_loss(
            values_n, micro.columns["values"], micro.columns["returns"], clip=self.ppo.value_clip
        )
        weights_n = _token_weights(micro, totals, self.ppo.aggregation)
        measured = {"critic/vf_clipfrac": stats["clipped"], "critic/vpred_mean": values_n}
        sums = {**_sums({"critic/vf_loss": loss_n}, weights_n), **_means(measured, totals)}
        return (weights_n * loss_n).sum(), sums


def _token_weights(micro: MicroBatch, totals: Totals, aggregation: str) -> torch.Tensor:
    weights_b = aggregation_weights(
        micro.lengths_b, total_rows=totals.rows, total_tokens=totals.tokens, aggregation=aggregation
    )
    return weights_b.repeat_interleave(micro.lengths_b)


def _sums(losses: dict[str, torch.Tensor], weights_n: torch.Tensor) -> Statistics:
    """Parts of the loss, aggregated as the loss is."""
    return {name: (weights_n * loss_n.detach()).sum() for name, loss_n in losses.items()}


def _means(measured: dict[str, torch.Tensor], totals: Totals) -> Statistics:
    """Contributions to means over all tokens of the mini-batch, whatever the loss's aggregation."""
    return {name: values_n.detach().sum() / max(totals.tokens, 1) for name, values_n in measured.items()}
