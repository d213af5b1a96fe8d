"""DAPO's soft overlong punishment and dynamic sampling, by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megappo.ppo.dynamic_sampling import informative, next_round
from megappo.ppo.shaping import overlong_penalty


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
