"""Scores from parts, by data source; normalisation; rewards of single tokens."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from megappo.config import LengthPenaltyConfig, PPOConfig, RewardConfig, RewardWeights
from megappo.credit import assign_credit
from megappo.data import batch
from megappo.ppo.kl import KLController
from megappo.rewards.mix import check_covered, mix
from megappo.rewards.resolve import RewardError
from megappo.rewards.scale import Moments, scaled
from megappo.rewards.worker import Outcome, judge

REWARD = RewardConfig(
    pool="score",
    model="scorer",
    by_source={"rules": "f", "both": "f"},
    weights=RewardWeights(function=2.0, model=0.5),
    weights_by_source={"rules": RewardWeights(model=0.0)},
    length_penalty=LengthPenaltyConfig(per_token=0.1, after=3),
)
SOURCES = ["rules", "both", "prose", "both", "both"]


def functions(**more: object) -> pa.Table:
    return pa.table(
        {
            "id": [4, 2, 9, 7, 1],
            "score": pa.array([1.0, 3.0, 0.0, 5.0, 0.0], pa.float32()),
            "failed": [False, False, False, False, True],
            "failure": ["", "", "", "", "ValueError: no"],
            **more,
        }
    )


def models(scores: list[float], failures: list[str]) -> pa.Table:
    return pa.table({"id": [1, 2, 7, 9], "score_model": pa.array(scores, pa.float32()), "failure_model": failures})


def test_parts_make_up_scores() -> None:
    assert check_covered(sorted({*SOURCES}), REWARD) == ["both", "rules"]
    judged = models([6.0, 4.0, float("nan"), -8.0], ["", "", "", ""])
    lengths = np.array([3, 5, 2, 4, 9])
    out = mix(functions(token_scores=[[1.0], [2.0], [0.0], [3.0], [0.0]]), judged, SOURCES, lengths, REWARD)
    np.testing.assert_allclose(batch.column(out, "score"), [1.0, 2 * 3 + 0.5 * 4 - 0.2, 0.5 * -8, 0, 0], rtol=1e-6)
    assert batch.column(out, "failed").tolist() == [False, False, False, True, True]
    assert out.column("failure").to_pylist()[3:] == ["the reward model gave nan", "ValueError: no"]
    np.testing.assert_allclose(batch.column(out, "score_function"), [1, 3, np.nan, 0, 0])
    np.testing.assert_allclose(batch.column(out, "score_model"), [np.nan, 4, -8, 0, 0])
    np.testing.assert_allclose(batch.column(out, "score_length"), [0, -0.2, 0, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(batch.flat(out, "token_scores"), [1, 4, 0, 0, 0])


def test_columns_do_not_depend_on_the_rows() -> None:
    """A round of dynamic sampling in which nothing is for the model is joined with others."""
    judged = models([6.0, 4.0, 2.0, -8.0], [""] * 4)
    lengths = np.array([3, 5, 2, 4, 9])
    with_model, without = (mix(functions(), one, SOURCES, lengths, REWARD) for one in (judged, None))
    assert without.schema == with_model.schema
    assert np.isnan(batch.column(without, "score_model")[:4]).all()  # the last row failed, and counts as 0


def test_a_source_that_nothing_scores() -> None:
    with pytest.raises(RewardError, match="no reward for data_source 'prose': give a weight"):
        check_covered(["prose"], RewardConfig(function="f", weights_by_source={"prose": RewardWeights(function=0.0)}))
    with pytest.raises(RewardError, match="no reward for data_source 'prose'; known: 'rules'"):
        check_covered(["prose", "rules"], RewardConfig(by_source={"rules": "f"}))


@pytest.mark.parametrize("normalize", ["batch", "running"])
def test_normalisation(normalize: str) -> None:
    reward = RewardConfig(function="f", normalize=normalize)  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    scores = rng.normal(3, 2, (4, 5)).astype(np.float32)
    moments, seen = Moments(), []
    for row in scores:
        failed = [False, False, False, False, True]
        rows = pa.table({"score": row, "failed": failed, "token_scores": [[value, 0.0] for value in row.tolist()]})
        out, moments = scaled(rows, reward, moments)
        seen = [*(seen if normalize == "running" else []), *row[:4]]
        expected = [*(row[:4] - np.mean(seen)) / np.std(seen, ddof=1), 0.0]
        np.testing.assert_allclose(batch.column(out, "score"), expected, rtol=1e-5, atol=1e-6)
        tokens = batch.flat(out, "token_scores")[::2]
        np.testing.assert_allclose(tokens, row / np.std(seen, ddof=1), rtol=1e-5)
    assert moments.count == (16 if normalize == "running" else 0)


def test_a_greedy_response_is_scaled_as_any_other() -> None:
    rows = pa.table({"score": [1.0, 3.0, 0.0], "failed": [False, False, True]})
    rows = rows.append_column("baseline", rows["score"]).append_column("baseline_failed", rows["failed"])
    out, _ = scaled(rows, RewardConfig(function="f", normalize="batch"), Moments())
    assert batch.column(out, "baseline").tolist() == batch.column(out, "score").tolist()
    np.testing.assert_allclose(batch.column(out, "baseline"), [-(0.5**0.5), 0.5**0.5, 0.0], rtol=1e-6)


def test_clipping_and_equal_scores() -> None:
    rows = pa.table({"score": pa.array([-4.0, 0.5, 9.0], pa.float32()), "failed": [False] * 3})
    out, _ = scaled(rows, RewardConfig(function="f", clip=2.0), Moments())
    assert batch.column(out, "score").tolist() == [-2.0, 0.5, 2.0]
    same = pa.table({"score": pa.array([3.0, 3.0], pa.float32()), "failed": [False] * 2})
    assert batch.column(scaled(same, RewardConfig(normalize="batch"), Moments())[0], "score").tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("result", "outcome"),
    [
        ({"token_scores": [1, 0.5, -2]}, Outcome(-0.5, "", "{}", (1.0, 0.5, -2.0))),
        ({"score": 4, "token_scores": np.ones(3), "acc": 1}, Outcome(7.0, "", '{"acc": 1.0}', (1.0, 1.0, 1.0))),
        ({"token_scores": [1, 2]}, Outcome(0.0, "returned 2 token_scores for a response of 3 tokens")),
        ({"token_scores": [1, 2, None]}, Outcome(0.0, "returned token_scores with None for token 2, not a number")),
        (
            {"token_scores": [1, float("nan"), 2]},
            Outcome(0.0, "returned token_scores with nan for token 1, not a number"),
        ),
        ({"token_scores": 3}, Outcome(0.0, "returned token_scores 3, not a list of numbers")),
    ],
)
def test_rewards_of_tokens(result: object, outcome: Outcome) -> None:
    assert judge(result, 3) == outcome


def test_token_scores_are_rewards_of_their_tokens() -> None:
    rows = pa.table(
        {
            "id": [1, 2],
            "score": pa.array([10.0, 2.0], pa.float32()),
            "token_scores": pa.array([[1.0, 2.0, 3.0], [0.0]], pa.list_(pa.float32())),
            "logprobs": pa.array([[-1.0, -1.0, -1.0], [-1.0]], pa.list_(pa.float32())),
        }
    )
    ppo = PPOConfig(estimator="reinforce_plus_plus", whiten_advantages=False, mini_batch=2, actor_lr=0.0)
    credit = assign_credit(rows, ppo, KLController(0.0, None, 1), max_response=8)
    np.testing.assert_allclose(batch.flat(credit.table, "rewards"), [1, 2, 7, 2])
