"""DAPO's soft overlong punishment, overlong filtering and dynamic sampling, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megappo.cluster.dataflow import Batch
from megappo.config import PPOConfig
from megappo.ppo.dynamic_sampling import informative, next_round
from megappo.ppo.shaping import overlong_penalty
from megappo.trainer import Trainer


def test_overlong_penalty_by_hand() -> None:
    lengths = torch.tensor([0, 15, 16, 17, 18, 19, 20, 25])
    found = overlong_penalty(lengths, longest=20, buffer=4)
    assert found.tolist() == [0, 0, 0, -0.25, -0.5, -0.75, -1, -1]
    assert overlong_penalty(torch.tensor([0, 5, 20]), longest=20, buffer=20).tolist() == [0, -0.25, -1]
    for buffer in (0, 21):
        with pytest.raises(ValueError, match=f"buffer is {buffer}; it must lie in .1, 20."):
            overlong_penalty(lengths, longest=20, buffer=buffer)


def test_groups_whose_scores_differ() -> None:
    assert informative(np.array([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [0.25, 0.5]])).tolist() == [
        False,
        True,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("kept", "seen", "expected"),
    [(0, 8, 8), (7, 8, 2), (4, 8, 8), (6, 8, 3), (2, 8, 8), (7, 7, 1), (7, 30, 5)],
)
def test_rounds_shrink_with_what_is_missing(kept: int, seen: int, expected: int) -> None:
    assert next_round(8, kept, seen) == expected


def test_responses_without_a_token_that_trains_are_in_no_optimizer_step() -> None:
    """The others stay in the steps that they are in anyway, so that none is much smaller than the rest."""
    ppo = PPOConfig(mini_batch=2, actor_lr=1.0, mask_truncated=True)
    driver: Any = SimpleNamespace(
        config=SimpleNamespace(run=SimpleNamespace(seed=1), ppo=ppo),
        step=3,
    )
    tokens = np.array([4, 9, 2, 9, 1])

    def steps(*loss_tokens: int) -> list[list[int]]:
        batch = Batch(np.arange(5), tokens, tokens, (), loss_tokens=np.array(loss_tokens))
        return [rows.tolist() for rows in Trainer._steps(driver, batch, 4)]

    whole = steps(4, 9, 2, 9, 1)
    assert [len(rows) for rows in whole] == [2, 2, 1] * 4
    kept = [[row for row in rows if row not in (1, 3)] for rows in whole]
    assert steps(4, 0, 2, 0, 1) == [rows for rows in kept if rows]
    assert steps(0, 0, 0, 0, 0) == []


def test_nothing_is_updated_where_all_responses_were_cut() -> None:
    driver: Any = SimpleNamespace(
        config=SimpleNamespace(
            run=SimpleNamespace(steps=9),
            ppo=PPOConfig(mini_batch=2, estimator="grpo", actor_lr=0.5, mask_truncated=True),
            roles=SimpleNamespace(rollout=SimpleNamespace(temperature=1.0)),
        ),
        step=3,
        oversight=SimpleNamespace(guards=SimpleNamespace(kl_factor=1.0, rate_factor=1.0)),
        cluster=SimpleNamespace(trained={"actor": None}, gather=lambda *pending: list(pending)),
    )
    batch = Batch(np.arange(2), np.array([3, 3]), np.array([2, 2]), (), loss_tokens=np.zeros(2, np.int64))
    assert Trainer.update(driver, batch) == {"actor/lr": 0.5}
