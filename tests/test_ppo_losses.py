"""Losses against hand-worked tables and finite differences; aggregation against plain means over a whole mini-batch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.ppo.losses import aggregation_weights, value_loss
from megappo.ppo.policy_losses import ppo_loss

torch.set_num_threads(1)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "clipped", "gradient"),
    [
        (1.25, 1.0, 3.0, 1.53125, 0, -1.75),  # inside the clip
        (2.0, 1.0, 3.0, 1.125, 1, 0.0),  # ran ahead towards the target: held at 1.5
        (0.0, 1.0, 3.0, 4.5, 0, -3.0),  # ran away from it: pulled back in full
        (4.0, 1.0, 1.75, 2.53125, 0, 2.25),  # overshot: the true error is the larger
    ],
)
def test_value_loss_by_hand(
    value: float, old: float, target: float, loss: float, clipped: int, gradient: float
) -> None:
    values_n = tensor(value).requires_grad_()
    loss_n, stats = value_loss(values_n, tensor(old), tensor(target), clip=0.5)
    loss_n.sum().backward()
    assert loss_n.item() == pytest.approx(loss, abs=1e-12)
    assert stats["clipped"].item() == clipped
    assert values_n.grad is not None and values_n.grad.item() == pytest.approx(gradient, abs=1e-12)


def test_value_loss_without_clip_is_half_the_squared_error() -> None:
    loss_n, stats = value_loss(tensor(2.0, -1.0), tensor(0.0, 0.0), tensor(5.0, -1.0), clip=None)
    assert loss_n.tolist() == [4.5, 0.0]
    assert stats["clipped"].tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match=r"clip is 0\.0"):
        value_loss(tensor(0.0), tensor(0.0), tensor(0.0), clip=0.0)


def test_value_loss_gradient_equals_finite_differences() -> None:
    generator = torch.Generator().manual_seed(5)
    values_n, old_values_n, returns_n = torch.randn(3, 30, generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x: value_loss(x, old_values_n, returns_n, clip=0.4)[0], values_n.requires_grad_()
    )


AGGREGATIONS = ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean")


def plain_mean(rows: list[list[float]], aggregation: str) -> float:
    """The loss of a whole mini-batch, from the words of its name."""
    if aggregation == "token_mean":
        tokens = [loss for row in rows for loss in row]
        return math.fsum(tokens) / len(tokens)
    if aggregation == "seq_mean_token_sum":
        return math.fsum(math.fsum(row) for row in rows) / len(rows)
    return math.fsum(math.fsum(row) / len(row) for row in rows) / len(rows)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=8), min_size=1, max_size=8),
    st.sampled_from(AGGREGATIONS),
    st.data(),
)
def test_aggregation_does_not_depend_on_the_split(
    rows: list[list[float]], aggregation: str, data: st.DataObject
) -> None:
    """Rows thrown on any (rank, micro-batch), some of them empty: the weighted sum is the mean over the whole."""
    homes = data.draw(st.lists(st.integers(0, 4), min_size=len(rows), max_size=len(rows)))
    total_tokens = sum(len(row) for row in rows)
    total = 0.0
    for home in range(5):
        here = [row for row, its_home in zip(rows, homes, strict=True) if its_home == home]
        lengths_b = torch.tensor([len(row) for row in here], dtype=torch.int64)
        weights_b = aggregation_weights(
            lengths_b, total_rows=len(rows), total_tokens=total_tokens, aggregation=aggregation
        )
        loss_n = torch.tensor([loss for row in here for loss in row], dtype=torch.float64)
        total += (weights_b.repeat_interleave(lengths_b) * loss_n).sum().item()
    assert total == pytest.approx(plain_mean(rows, aggregation), abs=1e-5)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradient_of_a_policy_does_not_depend_on_the_split(aggregation: str) -> None:
    """A softmax policy with shared parameters, trained on 6 uneven rows, whole or in pieces: one gradient."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(11, generator=generator, dtype=torch.float64)
    lengths = [1, 7, 3, 12, 2, 5]
    tokens = [torch.randint(11, (n,), generator=generator) for n in lengths]
    advantages = [torch.randn(n, generator=generator, dtype=torch.float64) for n in lengths]
    old = [(logits + 0.3 * torch.randn(11, generator=generator, dtype=torch.float64)).log_softmax(0)[t] for t in tokens]

    def row_losses(parameters: torch.Tensor, row: int) -> torch.Tensor:
        logprobs_n = parameters.log_softmax(0)[tokens[row]]
        return ppo_loss(logprobs_n, old[row], advantages[row], clip_low=0.2, clip_high=0.28, dual_clip=3.0)[0]

    whole = logits.clone().requires_grad_()
    losses = [row_losses(whole, row) for row in range(6)]
    {
        "token_mean": lambda: torch.cat(losses).mean(),
        "seq_mean_token_sum": lambda: torch.stack([loss.sum() for loss in losses]).mean(),
        "seq_mean_token_mean": lambda: torch.stack([loss.mean() for loss in losses]).mean(),
    }[aggregation]().backward()

    for split in (
        [[0, 1, 2, 3, 4, 5]],
        [[0], [1], [2], [3], [4], [5]],
        [[3, 0], [5, 4, 2, 1]],
        [[], [1, 5], [0, 2, 3, 4]],
    ):
        pieces = logits.clone().requires_grad_()
        for micro_batch in split:
            lengths_b = torch.tensor([lengths[row] for row in micro_batch], dtype=torch.int64)
            weights_b = aggregation_weights(lengths_b, total_rows=6, total_tokens=30, aggregation=aggregation)
            for weight, row in zip(weights_b, micro_batch, strict=True):
                (weight * row_losses(pieces, row)).sum().backward()
        if pieces.grad is None or whole.grad is None:
            pytest.fail("no gradient")
        torch.testing.assert_close(pieces.grad, whole.grad, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_rows_without_tokens_weigh_nothing(aggregation: str) -> None:
    weights_b = aggregation_weights(torch.tensor([0, 4]), total_rows=1, total_tokens=4, aggregation=aggregation)
    assert weights_b[0].item() == 0.0 and weights_b[1].item() > 0
    for lengths in ([0, 0], []):
        nothing_b = aggregation_weights(
            torch.tensor(lengths, dtype=torch.int64), total_rows=0, total_tokens=0, aggregation=aggregation
        )
        assert nothing_b.tolist() == [0.0] * len(lengths)


def test_aggregation_refuses_local_totals_and_unknown_names() -> None:
    with pytest.raises(ValueError, match="total_tokens=4 are below the 2 rows, 9 tokens here"):
        aggregation_weights(torch.tensor([5, 4]), total_rows=2, total_tokens=4, aggregation="token_mean")
    with pytest.raises(ValueError, match="total_rows=1, "):
        aggregation_weights(torch.tensor([5, 4]), total_rows=1, total_tokens=9, aggregation="token_mean")
    with pytest.raises(ValueError, match="aggregation is 'mean'; use one of token_mean,"):
        aggregation_weights(torch.tensor([1]), total_rows=1, total_tokens=1, aggregation="mean")
