"""Credit of a batch: a case worked by hand, and the padded recursion against one row at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from megappo.config import KLConfig, OverlongConfig, PPOConfig
from megappo.credit import Credit, assign_credit
from megappo.data import batch
from megappo.ppo.kl import KLController

PPO = PPOConfig(mini_batch=2, actor_lr=1e-6, critic_lr=1e-6, gamma=0.5, lam=0.5, whiten_advantages=False)
FIXED = KLController(0.1)


def ragged(*rows: list[float]) -> pa.ListArray:
    return batch.ragged(np.concatenate(rows).astype(np.float32), [len(row) for row in rows])


def by_hand() -> pa.Table:
    """A row of three tokens and a row of one; k1 = logprobs - ref_logprobs = (1, -2, 0) and (4)."""
    return pa.table(
        {
            "id": pa.array([7, 3], pa.int64()),
            "score": pa.array([2.0, -1.0], pa.float32()),
            "values": ragged([1.0, 2.0, 4.0], [0.5]),
            "logprobs": ragged([-1.0, -3.0, -2.0], [-1.0]),
            "ref_logprobs": ragged([-2.0, -1.0, -2.0], [-5.0]),
        }
    )


def credit_of(rows: pa.Table, ppo: PPOConfig, controller: KLController) -> Credit:
    return assign_credit(rows, ppo, controller, max_response=4)


def lists(table: pa.Table, name: str) -> list[list[float]]:
    return [row.tolist() for row in batch.split_rows(table, name)]


def test_worked_by_hand() -> None:
    credit = credit_of(by_hand(), PPO, FIXED)
    assert batch.column(credit.table, "id").tolist() == [7, 3]
    # The penalty -0.1 k1 on every token, and the score on the last one of each row.
    np.testing.assert_allclose(batch.flat(credit.table, "rewards"), [-0.1, 0.2, 2.0, -1.4], rtol=1e-6)
    # deltas: -0.1 + 1 - 1 = -0.1;  0.2 + 2 - 2 = 0.2;  2 - 4 = -2;  and -1.4 - 0.5 = -1.9. A_t = delta_t + A_{t+1} / 4.
    expected = [-0.1 + (0.2 - 2.0 / 4) / 4, 0.2 - 2.0 / 4, -2.0, -1.9]
    np.testing.assert_allclose(batch.flat(credit.table, "advantages"), expected, rtol=1e-6)
    returns = np.add(expected, [1.0, 2.0, 4.0, 0.5])
    np.testing.assert_allclose(batch.flat(credit.table, "returns"), returns, rtol=1e-6)
    assert credit.mean_kl == pytest.approx((1 - 2 + 0 + 4) / 2)  # a response
    assert credit.mean_token_kl == pytest.approx((1 - 2 + 0 + 4) / 4)
    assert [len(row) for row in lists(credit.table, "returns")] == [3, 1]
    assert credit.table.schema.field("advantages").type == pa.list_(pa.float32())


def test_without_a_critic() -> None:
    """Four responses to two prompts, rewards -0.1 k1 on each token and the score on the last: in all 2.1, 0, 5, 1."""
    rows = pa.table(
        {
            "id": pa.array([0, 1, 2, 3], pa.int64()),
            "prompt_index": pa.array([8, 3, 8, 3], pa.int64()),
            "score": pa.array([2.0, 0.0, 5.0, 1.0], pa.float32()),
            "logprobs": ragged([-1.0, -3.0], [-1.0], [-1.0], [-1.0, -1.0]),
            "ref_logprobs": ragged([-2.0, -1.0], [-1.0], [-1.0], [-1.0, -1.0]),
        }
    )

    def advantages(estimator: str) -> list[float]:
        ppo = replace(PPO, estimator=estimator, whiten_advantages=None)  # type: ignore[arg-type]
        table = credit_of(rows, ppo, FIXED).table
        assert "returns" not in table.column_names
        return batch.flat(table, "advantages").tolist()

    assert advantages("rloo") == pytest.approx([-2.9, -2.9, -1.0, 2.9, 1.0, 1.0], abs=1e-6)
    assert advantages("dr_grpo") == pytest.approx([-1.45, -1.45, -0.5, 1.45, 0.5, 0.5], abs=1e-6)
    half = 0.5**0.5  # a half over the deviation of two, which is their distance over the root of two
    assert advantages("grpo") == pytest.approx([-half, -half, -half, half, half, half], abs=1e-5)
    plain = np.array([-0.1 + 0.5 * 2.2, 2.2, 0.0, 5.0, 0.5, 1.0])  # gamma is a half
    white = (plain - plain.mean()) / plain.std(ddof=1)
    assert advantages("reinforce_plus_plus") == pytest.approx(white, abs=1e-5)
    centred = np.array([-1.45, -1.45, -0.5, 1.45, 0.5, 0.5])
    white = (centred - centred.mean()) / centred.std(ddof=1)
    assert advantages("reinforce_plus_plus_baseline") == pytest.approx(white, abs=1e-5)


def test_remax_takes_the_greedy_responses_score_off() -> None:
    rows = by_hand().append_column("baseline", pa.array([0.5, -2.0], pa.float32()))
    table = credit_of(rows, replace(PPO, estimator="remax"), FIXED).table
    # The rewards to come, -0.1 + 0.2 + 2, 0.2 + 2, 2 and -1.4, less 0.5 and -2.
    np.testing.assert_allclose(batch.flat(table, "advantages"), [1.6, 1.7, 1.5, 0.6], rtol=1e-6)


def test_long_responses_are_charged_on_their_last_token() -> None:
    ppo = replace(PPO, overlong=OverlongConfig(buffer=2, penalty=3.0), kl=KLConfig(in_reward=False, loss_coef=0.1))
    credit = credit_of(by_hand(), ppo, FIXED)  # of 4 tokens, the first row has 3
    assert lists(credit.table, "rewards") == [[0.0, 0.0, 2.0 - 3.0 / 2], [-1.0]]
    assert credit.mean_overlong == -0.75


def test_remax_charges_the_greedy_response_for_its_length_too() -> None:
    """The same text, sampled and greedy, has no advantage, however long; a longer one than the greedy has less."""
    rows = by_hand().append_column("baseline", pa.array([2.0, -1.0], pa.float32()))
    rows = rows.append_column("baseline_tokens", pa.array([3, 4], pa.int64()))
    ppo = replace(PPO, estimator="remax", overlong=OverlongConfig(buffer=2, penalty=3.0), kl=KLConfig(in_reward=False))
    credit = credit_of(rows, ppo, FIXED)
    assert lists(credit.table, "advantages") == [[0.0, 0.0, 0.0], [3.0]]  # the second is within 1 token, not 4
    assert ppo.greedy_columns == ("baseline", "baseline_failed", "baseline_tokens")


@pytest.mark.parametrize("whitens", [False, True])
def test_responses_that_were_cut_do_not_train(whitens: bool) -> None:
    """They count in their group's mean, and in nothing that trains: not in whitening either."""
    rows = pa.table(
        {
            "id": pa.array([0, 1, 2], pa.int64()),
            "prompt_index": pa.array([8, 8, 8], pa.int64()),
            "score": pa.array([2.0, 0.0, 4.0], pa.float32()),
            "logprobs": ragged([-1.0, -3.0], [-1.0, -1.0, -1.0, -1.0], [-1.0]),
            "finish_reason": ["stop", "length", "stop"],
        }
    )
    ppo = replace(
        PPO, estimator="dr_grpo", mask_truncated=True, whiten_advantages=whitens, kl=KLConfig(in_reward=False)
    )
    credit = credit_of(rows, ppo, FIXED)
    plain = np.array([0.0, 0.0, 2.0])  # 2 and 4 less their mean with the one that was cut
    white = (plain - plain.mean()) / plain.std(ddof=1)
    expected = white if whitens else plain
    assert batch.split_rows(credit.table, "advantages")[1].tolist() == [0.0] * 4
    found = batch.flat(credit.table, "advantages")[[0, 1, 6]]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert credit.loss_tokens.tolist() == [2, 0, 1]
    assert credit_of(rows, replace(ppo, mask_truncated=False), FIXED).loss_tokens.tolist() == [2, 4, 1]


def test_whitening_is_over_all_tokens_and_leaves_returns_alone() -> None:
    plain = credit_of(by_hand(), PPO, FIXED)
    white = credit_of(by_hand(), replace(PPO, whiten_advantages=True), FIXED)
    a = batch.flat(plain.table, "advantages")
    np.testing.assert_allclose(
        batch.flat(white.table, "advantages"), (a - a.mean()) / np.sqrt(a.var(ddof=1) + 1e-8), rtol=1e-5
    )
    for name in ("rewards", "returns"):
        assert white.table.column(name).equals(plain.table.column(name))


def test_without_a_reference_the_reward_is_the_score() -> None:
    credit = credit_of(by_hand().drop_columns(["ref_logprobs"]), PPO, FIXED)
    assert lists(credit.table, "rewards") == [[0.0, 0.0, 2.0], [-1.0]]
    assert (credit.mean_kl, credit.mean_token_kl) == (0.0, 0.0)


def test_kl_loss_alone_is_observed_but_not_charged() -> None:
    credit = credit_of(by_hand(), replace(PPO, kl=KLConfig(in_reward=False, loss_coef=0.1)), FIXED)
    assert lists(credit.table, "rewards") == [[0.0, 0.0, 2.0], [-1.0]]
    assert credit.mean_kl == pytest.approx(1.5)


@pytest.mark.parametrize(("estimator", "kl"), [("k1", [1, -2, 0, 4]), ("k2", [0.5, 2, 0, 8])])
def test_estimator_is_the_configured_one(estimator: str, kl: list[float]) -> None:
    credit = credit_of(by_hand(), replace(PPO, kl=KLConfig(estimator=estimator)), FIXED)
    assert credit.mean_kl == pytest.approx(sum(kl) / 2)


def test_a_row_does_not_depend_on_the_others() -> None:
    rng = np.random.default_rng(5)
    lengths = [4, 1, 9, 2, 6]
    table = pa.table(
        {
            "id": pa.array(range(5), pa.int64()),
            "score": pa.array(rng.standard_normal(5), pa.float32()),
            **{
                name: batch.ragged(rng.standard_normal(sum(lengths)).astype(np.float32), lengths)
                for name in ("values", "logprobs", "ref_logprobs")
            },
        }
    )
    together = credit_of(table, PPO, FIXED).table
    for row in range(5):
        assert credit_of(table.slice(row, 1), PPO, FIXED).table.equals(together.slice(row, 1).combine_chunks())
