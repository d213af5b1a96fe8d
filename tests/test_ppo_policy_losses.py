"""Losses of the policy against hand-worked tables, finite differences and the papers' own sums."""

from __future__ import annotations

import math
import random

import pytest
import torch

from megappo.ppo.policy_losses import cispo_loss, gspo_loss, ppo_loss, sequence_log_ratio

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
def test_ppo_loss_by_hand(
    ratio: float, advantage: float, loss: float, clipped: int, clipped_lower: int, gradient: float
) -> None:
    old_logprobs_n = tensor(-1.3)
    logprobs_n = (old_logprobs_n + math.log(ratio)).requires_grad_()
    loss_n, stats = ppo_loss(logprobs_n, old_logprobs_n, tensor(advantage), clip_low=0.2, clip_high=0.5, dual_clip=3.0)
    loss_n.sum().backward()
    assert loss_n.item() == pytest.approx(loss, abs=1e-12)
    assert logprobs_n.grad is not None and logprobs_n.grad.item() == pytest.approx(gradient, abs=1e-12)
    assert stats["clipped"].item() == clipped
    assert stats["clipped_lower"].item() == clipped_lower
    assert stats["ratio"].item() == pytest.approx(ratio)
    assert stats["approx_kl"].item() == pytest.approx(-math.log(ratio), abs=1e-12)
    assert not any(stat.requires_grad for stat in stats.values())


def test_ppo_loss_without_dual_clip_is_unbounded_at_negative_advantages() -> None:
    loss_n, stats = ppo_loss(tensor(math.log(50)), tensor(0.0), tensor(-2.0), clip_low=0.2, clip_high=0.2)
    assert loss_n.item() == pytest.approx(100)
    assert stats["clipped_lower"].item() == 0


def test_ppo_loss_survives_a_broken_token() -> None:
    logprobs_n = torch.tensor([0.0, -200.0], requires_grad=True)
    loss_n, stats = ppo_loss(
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
def test_ppo_loss_gradient_equals_finite_differences(dual_clip: float | None) -> None:
    logprobs_n, old_logprobs_n, advantages_n = away_from_kinks(seed=3)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return ppo_loss(x, old_logprobs_n, advantages_n, clip_low=0.2, clip_high=0.3, dual_clip=dual_clip)[0]

    assert torch.autograd.gradcheck(loss, logprobs_n.requires_grad_())


@pytest.mark.parametrize(
    ("clips", "message"),
    [
        ({"clip_low": 1.5, "clip_high": 0.2}, r"clip_low is 1.5"),
        ({"clip_low": 0.2, "clip_high": -0.1}, r"clip_high is -0.1"),
        ({"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 1.0}, r"dual_clip is 1.0; it must be > 1"),
    ],
)
def test_ppo_loss_refuses_clips_out_of_range(clips: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ppo_loss(tensor(0.0), tensor(0.0), tensor(1.0), **clips)


# --- GSPO ------------------------------------------------------------------------------------------------------------

LENGTHS = [3, 1, 4]


def paper_gspo(rows: list[torch.Tensor], old: list[torch.Tensor], advantages: list[float]) -> torch.Tensor:
    """Equation 5 with equation 7's ratio, negated: one number a response, its gradient through the whole ratio."""
    terms = []
    for logprobs, old_logprobs, advantage in zip(rows, old, advantages, strict=True):
        ratio = (logprobs.sum() - old_logprobs.sum()).exp() ** (1 / len(logprobs))
        terms.append(torch.minimum(ratio * advantage, ratio.clip(0.9, 1.2) * advantage))
    return -torch.stack(terms).mean()


@pytest.mark.parametrize("advantages", [[1.0, -2.0, 0.5], [-1.0, 2.0, -0.5]])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gspo_equals_the_papers_sum_and_its_gradient(advantages: list[float], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    n = sum(LENGTHS)
    old_logprobs_n = -torch.rand(n, generator=generator, dtype=torch.float64)
    start_n = old_logprobs_n + 0.3 * torch.randn(n, generator=generator, dtype=torch.float64)
    lengths_b = torch.tensor(LENGTHS)
    lengths = lengths_b.repeat_interleave(lengths_b)

    whole_n = start_n.clone().requires_grad_()
    expected = paper_gspo(list(whole_n.split(LENGTHS)), list(old_logprobs_n.split(LENGTHS)), advantages)
    expected.backward()

    logprobs_n = start_n.clone().requires_grad_()
    mean_n = sequence_log_ratio(start_n - old_logprobs_n, lengths_b)
    advantages_n = torch.tensor(advantages, dtype=torch.float64).repeat_interleave(lengths_b)
    loss_n, stats = gspo_loss(logprobs_n, old_logprobs_n, advantages_n, mean_n, clip_low=0.1, clip_high=0.2)
    loss = (loss_n / lengths / len(LENGTHS)).sum()  # the aggregation seq_mean_token_mean
    loss.backward()

    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    torch.testing.assert_close(logprobs_n.grad, whole_n.grad)
    ratios = [
        (row.mean() - o.mean()).exp()
        for row, o in zip(start_n.split(LENGTHS), old_logprobs_n.split(LENGTHS), strict=True)
    ]
    torch.testing.assert_close(stats["ratio"], torch.stack(ratios).repeat_interleave(lengths_b))
    held = [r > 1.2 if a > 0 else r < 0.9 for r, a in zip(ratios, advantages, strict=True)]
    assert stats["clipped"].tolist() == torch.tensor(held).double().repeat_interleave(lengths_b).tolist()
    torch.testing.assert_close(stats["approx_kl"], old_logprobs_n - start_n)


def test_sequence_log_ratio_by_hand() -> None:
    found = sequence_log_ratio(tensor(1.0, 2.0, 6.0, -4.0), torch.tensor([3, 1]))
    assert found.tolist() == [3.0, 3.0, 3.0, -4.0]
    assert sequence_log_ratio(tensor(), torch.tensor([], dtype=torch.int64)).tolist() == []


# --- CISPO -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "weight", "clipped"), [(1.0, 1.0, 0), (1.4, 1.4, 0), (1.6, 1.5, 1), (0.9, 0.9, 0), (0.5, 0.8, 1)]
)
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_cispo_by_hand(ratio: float, weight: float, clipped: int, advantage: float) -> None:
    """The gradient never vanishes: it is the clipped ratio's, whatever the advantage's sign."""
    old_logprobs_n = tensor(-1.3)
    logprobs_n = (old_logprobs_n + math.log(ratio)).requires_grad_()
    loss_n, stats = cispo_loss(logprobs_n, old_logprobs_n, tensor(advantage), clip_low=0.2, clip_high=0.5)
    loss_n.sum().backward()
    assert loss_n.item() == pytest.approx(-weight * advantage * (-1.3 + math.log(ratio)), abs=1e-12)
    assert logprobs_n.grad is not None and logprobs_n.grad.item() == pytest.approx(-weight * advantage, abs=1e-12)
    assert stats["clipped"].item() == clipped
    assert stats["ratio"].item() == pytest.approx(ratio)


def test_cispo_without_a_lower_bound() -> None:
    logprobs_n = tensor(-5.0).requires_grad_()
    loss_n, stats = cispo_loss(logprobs_n, tensor(-1.0), tensor(1.0), clip_low=1.0, clip_high=0.5)
    loss_n.sum().backward()
    assert logprobs_n.grad is not None and logprobs_n.grad.item() == pytest.approx(-math.exp(-4))
    assert stats["clipped"].item() == 0
