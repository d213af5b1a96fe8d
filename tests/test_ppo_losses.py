"""Losses against hand-worked tables and finite differences; aggregation against plain means over a whole mini-batch."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.ppo.losses import aggregation_weights, policy_loss, value_loss

torch.set_num_threads(1)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# clip_low 0.2, clip_high 0.5, dual_clip 3
POLICY_TABLE = [
    # ratio, advantage, loss, clipped, clipped_lower, d loss / d logprob
    (1.0, 2.0, -2.0, 0, 0, -2.0),  # the first update: the plain policy gradient
    (1.0, -2.0, 2.0, 0, 0, 2.0),
    (1.4, 2.0, -2.8, 0, 0, -2.8),  # above 1.2 but inside the higher upper clip
    (1.6, 2.0, -3.0, 1, 0, 0.0),  # gained enough: held at 1.5
    (0.5, 2.0, -1.0, 0, 0, -1.0),  # a good token that became rare is still pushed up
    (0.5, -2.0, 1.6, 1, 0, 0.0),  # a bad token that fell enough: held at 0.8
    (0.9, -2.0, 1.8, 0, 0, 1.8),
    (2.5, -2.0, 5.0, 0, 0, 5.0),  # a bad token that became likely is pushed down,
    (4.0, -2.0, 6.0, 0, 1, 0.0),  # but only up to 3 times its advantage
    (4.0, 2.0, -3.0, 1, 0, 0.0),  # the dual clip leaves positive advantages alone
    (4.0, 0.0, 0.0, 0, 0, 0.0),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "clipped", "clipped_lower", "gradient"), POLICY_TABLE)
def test_policy_loss_by_hand(
    ratio: float, advantage: float, loss: float, clipped: int, clipped_lower: int, gradient: float
) -> None:
    old_logprobs_n = tensor(-1.3)
    logprobs_n = (old_logprobs_n + math.log(ratio)).requires_grad_()
    loss_n, stats = policy_loss(
        logprobs_n, old_logprobs_n, tensor(advantage), clip_low=0.2, clip_high=0.5, dual_clip=3.0
    )
    loss_n.sum().backward()
    assert loss_n.item() == pytest.approx(loss, abs=1e-12)
    assert logprobs_n.grad is not None and logprobs_n.grad.item() == pytest.approx(gradient, abs=1e-12)
    assert stats["clipped"].item() == clipped
    assert stats["clipped_lower"].item() == clipped_lower
    assert stats["ratio"].item() == pytest.approx(ratio)
    assert stats["approx_kl"].item() == pytest.approx(-math.log(ratio), abs=1e-12)
    assert not any(stat.requires_grad for stat in stats.values())


def test_policy_loss_without_dual_clip_is_unbounded_at_negative_advantages() -> None:
    loss_n, stats = policy_loss(tensor(math.log(50)), tensor(0.0), tensor(-2.0), clip_low=0.2, clip_high=0.2)
    assert loss_n.item() == pytest.approx(100)
    assert stats["clipped_lower"].item() == 0


def test_policy_loss_survives_a_broken_token() -> None:
    logprobs_n = torch.tensor([0.0, -200.0], requires_grad=True)
    loss_n, stats = policy_loss(
        logprobs_n, torch.tensor([-200.0, 0.0]), torch.tensor([-1.0, 1.0]), clip_low=0.2, clip_high=0.2
    )
    loss_n.sum().backward()
    assert loss_n[0].item() == pytest.approx(math.exp(20), rel=1e-6)
    assert loss_n[1].item() == pytest.approx(-math.exp(-20), rel=1e-6)
    assert logprobs_n.grad is not None and logprobs_n.grad.tolist() == [0.0, 0.0]
    assert stats["approx_kl"].tolist() == [-200.0, 200.0]


def away_from_kinks(seed: int, n: int = 40) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random log-probabilities whose ratios stay 0.01 away from 0.8, 1.3 and 2, where the loss has corners."""
    rng = random.Random(seed)
    log_ratios: list[float] = []
    while len(log_ratios) < n:
        candidate = rng.gauss(0, 0.7)
        if all(abs(math.exp(candidate) - kink) > 0.01 for kink in (0.8, 1.3, 2.0)):
            log_ratios.append(candidate)
    old = tensor(*[-rng.expovariate(1) for _ in range(n)])
    return old + tensor(*log_ratios), old, tensor(*[rng.gauss(0, 1) for _ in range(n)])


@pytest.mark.parametrize("dual_clip", [None, 2.0])
def test_policy_loss_gradient_equals_finite_differences(dual_clip: float | None) -> None:
    logprobs_n, old_logprobs_n, advantages_n = away_from_kinks(seed=3)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return policy_loss(x, old_logprobs_n, advantages_n, clip_low=0.2, clip_high=0.3, dual_clip=dual_clip)[0]

    assert torch.autograd.gradcheck(loss, logprobs_n.requires_grad_())


@pytest.mark.parametrize(
    ("clips", "message"),
    [
        ({"clip_low": 1.0, "clip_high": 0.2}, r"clip_low is 1.0"),
        ({"clip_low": 0.2, "clip_high": -0.1}, r"clip_high is -0.1"),
        ({"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 1.0}, r"dual_clip is 1.0; it must be > 1"),
    ],
)
def test_policy_loss_refuses_clips_out_of_range(clips: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy_loss(tensor(0.0), tensor(0.0), tensor(1.0), **clips)


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
        return policy_loss(logprobs_n, old[row], advantages[row], clip_low=0.2, clip_high=0.28, dual_clip=3.0)[0]

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
