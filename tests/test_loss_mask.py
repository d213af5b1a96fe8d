"""Tokens that the policy did not produce: stepped over in credit and loss, as in plain loops over the others only."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch

from megappo.config import CorrectionConfig, PPOConfig
from megappo.config.ppo import Estimator
from megappo.credit import Credit, assign_credit
from megappo.data import batch
from megappo.data.loss_mask import LossMaskError, flat_mask
from megappo.ppo.kl import KLController
from megappo.workers.micro_batch import make_micro_batches

GAMMA, LAM, COEF = 0.9, 0.8, 0.1
ESTIMATORS: tuple[Estimator, ...] = (
    *("gae", "grpo", "dr_grpo", "rloo", "remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline"),
)
PER_TOKEN = ("logprobs", "ref_logprobs", "rollout_logprobs", "values")


def make_rows(seed: int, masked: bool) -> pa.Table:
    """Eight responses to four prompts; each keeps at least one token, and every kind of hole occurs."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 9, 8)
    masks = [rng.random(n) < 0.6 for n in lengths]
    for mask in masks:
        mask[rng.integers(len(mask))] = True
    total = int(lengths.sum())
    columns = {
        "id": pa.array(rng.permutation(8), pa.int64()),
        "prompt_index": pa.array([3, 3, 1, 1, 0, 0, 2, 2], pa.int64()),
        "score": pa.array(rng.standard_normal(8), pa.float32()),
        "baseline": pa.array(rng.standard_normal(8), pa.float32()),
        **{name: batch.ragged(rng.standard_normal(total).astype(np.float32), lengths) for name in PER_TOKEN},
    }
    if masked:
        columns["loss_mask"] = batch.ragged(np.concatenate(masks).astype(np.int8), lengths)
    return pa.table(columns)


def credit_of(rows: pa.Table, estimator: Estimator) -> Credit:
    ppo = PPOConfig(
        mini_batch=2,
        actor_lr=1.0,
        estimator=estimator,
        gamma=GAMMA,
        lam=LAM,
        correction=CorrectionConfig(level="sequence", threshold=1.5),
    )
    return assign_credit(rows, ppo, KLController(COEF), max_response=9)


def plain(rows: pa.Table, estimator: str) -> tuple[list[list[float]], list[list[float]], list[float]]:
    """(rewards, advantages) of the produced tokens of each row, nothing else; and each row's correction weight."""
    lists = {name: rows.column(name).to_pylist() for name in rows.column_names}
    keep = [[at for at, one in enumerate(mask) if one] for mask in lists["loss_mask"]]
    taken = {name: [[row[at] for at in k] for row, k in zip(lists[name], keep, strict=True)] for name in PER_TOKEN}
    rewards = []
    for policy, reference, score in zip(taken["logprobs"], taken["ref_logprobs"], lists["score"], strict=True):
        rewards.append([-COEF * (a - b) for a, b in zip(policy, reference, strict=True)])
        rewards[-1][-1] += score
    totals = [sum(row) for row in rewards]
    advantages: list[list[float]] = []
    for row, reward in enumerate(rewards):
        group = [totals[i] for i in range(8) if lists["prompt_index"][i] == lists["prompt_index"][row]]
        mean = sum(group) / 2
        if estimator == "gae":
            out, later, value_after = [], 0.0, 0.0
            for r, v in zip(reversed(reward), reversed(taken["values"][row]), strict=True):
                later = r + GAMMA * value_after - v + GAMMA * LAM * later
                value_after = v
                out.insert(0, later)
        elif estimator in ("reinforce_plus_plus", "remax"):
            gamma, baseline = (1.0, lists["baseline"][row]) if estimator == "remax" else (GAMMA, 0.0)
            out, later = [], 0.0
            for r in reversed(reward):
                later = r + gamma * later
                out.insert(0, later - baseline)
        else:
            one = totals[row] - mean
            if estimator == "rloo":
                one = totals[row] - (sum(group) - totals[row])
            if estimator == "grpo":
                one /= (sum((x - mean) ** 2 for x in group)) ** 0.5 + 1e-6
            out = [one] * len(reward)
        advantages.append(out)
    if estimator in ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        every = np.concatenate(advantages)
        advantages = [list((np.array(row) - every.mean()) / every.std(ddof=1)) for row in advantages]
    pairs = zip(taken["logprobs"], taken["rollout_logprobs"], strict=True)
    weights = [min(float(np.exp(sum(new) - sum(old))), 1.5) for new, old in pairs]
    return rewards, advantages, weights


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_credit_equals_a_plain_loop_over_the_produced_tokens(estimator: Estimator, seed: int) -> None:
    rows = make_rows(seed, masked=True)
    credit = credit_of(rows, estimator)
    rewards, advantages, weights = plain(rows, estimator)
    masks = batch.split_rows(rows, "loss_mask")
    assert credit.loss_tokens.tolist() == [mask.sum() for mask in masks]
    expected = {"rewards": rewards, "advantages": advantages, "correction": weights}
    for name, values in expected.items():
        for found, mask, value in zip(batch.split_rows(credit.table, name), masks, values, strict=True):
            np.testing.assert_allclose(found[mask == 1], value, rtol=2e-5, atol=2e-6)
            assert (found[mask == 0] == 0).all()
    if estimator == "gae":
        for got, value, advantage, mask in zip(
            *(batch.split_rows(credit_of(rows, "gae").table, "returns"), batch.split_rows(rows, "values")),
            *(gae_of(rows), masks),
            strict=True,
        ):
            np.testing.assert_allclose(got[mask == 1], value[mask == 1] + advantage, rtol=2e-5, atol=2e-6)


def gae_of(rows: pa.Table) -> list[np.ndarray]:
    """Advantages of the plain loop, not whitened."""
    out = []
    rewards, _, _ = plain(rows, "gae")
    for reward, values, mask in zip(
        rewards, batch.split_rows(rows, "values"), batch.split_rows(rows, "loss_mask"), strict=True
    ):
        kept = values[mask == 1]
        deltas = np.array(reward) + GAMMA * np.append(kept[1:], 0.0) - kept
        powers = GAMMA * LAM
        out.append(np.array([sum(powers**k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))]))
    return out


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("kind", [pa.int8(), pa.bool_()])
def test_a_mask_of_ones_changes_nothing(estimator: Estimator, kind: pa.DataType) -> None:
    rows = make_rows(3, masked=False)
    ones = pa.array([[1] * n for n in batch.lengths(rows, "logprobs")], pa.list_(pa.int8())).cast(pa.list_(kind))
    plain, masked = credit_of(rows, estimator), credit_of(rows.append_column("loss_mask", ones), estimator)
    assert masked.table.equals(plain.table)
    assert replace(masked, table=None, loss_tokens=None) == replace(plain, table=None, loss_tokens=None)  # type: ignore[arg-type]
    assert masked.loss_tokens.tolist() == plain.loss_tokens.tolist()


def test_nothing_at_other_tokens_matters() -> None:
    rows = make_rows(4, masked=True)
    spoilt = rows
    for name in PER_TOKEN:
        values = np.where(batch.flat(rows, "loss_mask") == 1, batch.flat(rows, name), np.nan).astype(np.float32)
        column = batch.ragged(values, batch.lengths(rows, name))
        spoilt = spoilt.set_column(spoilt.column_names.index(name), name, column)
    assert credit_of(spoilt, "gae").table.equals(credit_of(rows, "gae").table)


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ([[1, 0], [0, 0, 0]], "loss_mask of row 9: no token of its response is the policy's"),
        ([[1], [1, 0, 0]], "loss_mask of row 4: 1 values for 2 response tokens"),
        ([[1, 0], [1, 2, 0]], "loss_mask of row 9: 2 is neither 0 nor 1"),
    ],
)
def test_masks_that_do_not_fit_are_refused(masks: list[list[int]], message: str) -> None:
    rows = pa.table({"id": [4, 9], "response_ids": [[5, 6], [7, 8, 9]], "loss_mask": masks})
    with pytest.raises(LossMaskError, match=message):
        flat_mask(rows, "response_ids")


def test_only_produced_tokens_are_targets() -> None:
    rows = pa.table(
        {
            "id": pa.array([4, 9], pa.int64()),
            "prompt_ids": pa.array([[1, 2], [3]], pa.list_(pa.int32())),
            "response_ids": pa.array([[5, 6, 7], [8, 9]], pa.list_(pa.int32())),
            "values": pa.array([[0.5, 0.6, 0.7], [0.8, 0.9]], pa.list_(pa.float32())),
            "loss_mask": pa.array([[True, False, True], [False, True]], pa.list_(pa.bool_())),
        }
    )
    (micro,) = make_micro_batches(rows, token_budget=99, multiple=1, columns=["values"], device=torch.device("cpu"))
    assert micro.input_ids_1t.tolist() == [[1, 2, 5, 6, 3, 8]]  # all of it is read
    assert micro.rows_n.tolist() == [1, 3, 5]
    assert micro.targets_n.tolist() == [5, 7, 9]
    assert micro.lengths_b.tolist() == [2, 1]
    torch.testing.assert_close(micro.columns["values"], torch.tensor([0.5, 0.7, 0.9]))
