"""Credit assignment of one batch: from scores and log-probabilities to token rewards, advantages and returns.

Arrow in, Arrow out; the formulas are in :mod:`megappo.ppo`. Token columns are padded only here, for the recursion.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch

from megappo.config import PPOConfig
from megappo.data import batch
from megappo.data.loss_mask import flat_mask, was_cut
from megappo.ppo import estimators
from megappo.ppo.advantages import gae, token_rewards_bt, whiten
from megappo.ppo.correction import truncated_weights
from megappo.ppo.kl import KLController, kl_estimate
from megappo.ppo.shaping import overlong_penalty

GROUPED = {
    "grpo": estimators.grpo,
    "dr_grpo": estimators.dr_grpo,
    "rloo": estimators.rloo,
    "reinforce_plus_plus_baseline": estimators.dr_grpo,  # which is then whitened
}


@dataclass(frozen=True)
class Credit:
    """What :func:`assign_credit` gives.

    Attributes:
        table: ``id``, ``rewards``, ``advantages``, with a critic ``returns`` and, where a correction is configured,
            ``correction``, ragged float32 over response tokens.
        loss_tokens: int64, tokens of each row that train: those that the policy produced, none of a response that is
            left out.
        mean_kl: estimated KL to the reference per response, in nats; 0 without a reference.
        mean_token_kl: the same per token.
        mean_overlong: mean of what was taken off the scores for length; 0 where that is not configured.
    """

    table: pa.Table
    loss_tokens: np.ndarray
    mean_kl: float
    mean_token_kl: float
    mean_overlong: float = 0.0


def assign_credit(rows: pa.Table, ppo: PPOConfig, controller: KLController, *, max_response: int) -> Credit:
    """Token-level rewards (score on the last token, KL penalty on each) and the advantages that follow from them.

    Args:
        rows: ``id``, ``score``, ``logprobs``; ``values`` with a critic, ``prompt_index`` where responses to a prompt
            are compared, ``baseline`` where it is a greedy response's score (with ``baseline_tokens``, its length,
            where long ones are charged); ``token_scores`` where functions gave some; ``ref_logprobs`` where a KL term
            is in use; ``rollout_logprobs`` where a correction is configured; and ``finish_reason`` where responses that
            were cut do not train: they count in their group's mean and in KL, but have no advantage.
            With ``loss_mask``, tokens that the policy did not produce are stepped over, and 0 in every result.
        controller: holds the coefficient of the penalty.
        max_response: tokens that a response may have.

    Raises:
        LossMaskError: a mask does not fit its response.
    """
    logprobs_np, real_np = batch.pad(rows, "logprobs")
    mask_np = real_np.copy()
    mask_np[real_np] = flat_mask(rows, "logprobs")
    mask_bt = torch.from_numpy(mask_np)
    scores_b = torch.from_numpy(batch.column(rows, "score").astype(np.float32))
    trained_bt = mask_bt
    if ppo.mask_truncated:
        trained_bt = mask_bt & ~torch.from_numpy(was_cut(rows))[:, None]
    overlong_b = _overlong(batch.lengths(rows, "logprobs"), ppo, max_response)
    kl_bt = None
    if "ref_logprobs" in rows.column_names:
        reference_bt = torch.from_numpy(batch.pad(rows, "ref_logprobs")[0])
        kl_bt = torch.where(mask_bt, kl_estimate(torch.from_numpy(logprobs_np), reference_bt, ppo.kl.estimator), 0.0)
    penalised = kl_bt if ppo.kl.in_reward else None
    own_bt = torch.zeros(mask_bt.shape, dtype=scores_b.dtype)
    if "token_scores" in rows.column_names:  # a part of the score that is not the last token's
        own_bt = torch.where(mask_bt, torch.from_numpy(batch.pad(rows, "token_scores")[0]), 0.0)
    last_b = scores_b + overlong_b - own_bt.sum(1)
    rewards_bt = token_rewards_bt(last_b, penalised, mask_bt, controller.coef) + own_bt
    columns = {"rewards": rewards_bt, **_advantages(rows, ppo, rewards_bt, mask_bt, max_response)}
    columns["advantages"] = torch.where(trained_bt, columns["advantages"], 0.0)
    if ppo.whitens:
        columns["advantages"] = whiten(columns["advantages"], trained_bt)
    if ppo.correction_level != "off":
        actor_bt, drawn_bt = torch.from_numpy(logprobs_np), torch.from_numpy(batch.pad(rows, "rollout_logprobs")[0])
        level, threshold = ppo.correction_level, ppo.correction.threshold
        columns["correction"] = truncated_weights(actor_bt, drawn_bt, mask_bt, level=level, threshold=threshold)
    ragged = {name: batch.unpad(x_bt.float().numpy(), real_np) for name, x_bt in columns.items()}
    return Credit(
        table=pa.table({"id": rows.column("id"), **ragged}),
        loss_tokens=trained_bt.sum(1).numpy(),
        mean_kl=0.0 if kl_bt is None else float(kl_bt.sum(1).mean()),
        mean_token_kl=0.0 if kl_bt is None else float(kl_bt.sum() / mask_bt.sum()),
        mean_overlong=float(overlong_b.mean()),
    )


def _overlong(lengths: np.ndarray, ppo: PPOConfig, max_response: int) -> torch.Tensor:
    """What responses of these lengths, int64 [b], are charged for them: [b] float32, at most 0."""
    if ppo.overlong is None:
        return torch.zeros(len(lengths))
    lengths_b = torch.from_numpy(lengths.copy())
    return ppo.overlong.penalty * overlong_penalty(lengths_b, longest=max_response, buffer=ppo.overlong.buffer)


def _advantages(
    rows: pa.Table, ppo: PPOConfig, rewards_bt: torch.Tensor, mask_bt: torch.Tensor, max_response: int
) -> dict[str, torch.Tensor]:
    """``advantages``, not yet whitened, and with a critic ``returns``."""
    if ppo.needs_critic:
        values_bt = torch.from_numpy(batch.pad(rows, "values")[0])
        advantages_bt, returns_bt = gae(rewards_bt, values_bt, mask_bt, ppo.gamma, ppo.lam)
        return {"advantages": advantages_bt, "returns": returns_bt}
    if ppo.compares_responses:
        groups_b = torch.from_numpy(batch.column(rows, "prompt_index").copy())
        return {"advantages": GROUPED[ppo.estimator](rewards_bt, mask_bt, groups_b)}
    if ppo.needs_greedy:
        baselines_b = torch.from_numpy(batch.column(rows, "baseline").copy())
        if ppo.overlong is not None:
            baselines_b += _overlong(batch.column(rows, "baseline_tokens"), ppo, max_response)
        return {"advantages": estimators.remax(rewards_bt, mask_bt, baselines_b)}
    return {"advantages": estimators.reinforce_plus_plus(rewards_bt, mask_bt, ppo.gamma)}
