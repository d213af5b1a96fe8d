"""KL estimators against exact divergences of small distributions; the KL controller against hand-worked steps."""

from __future__ import annotations

import math

import pytest
import torch

from megappo.ppo.kl import KLController, kl_estimate

torch.set_num_threads(1)


def test_hand_values() -> None:
    # policy 1/2, reference 1/4: r = 1/2
    logprobs, ref_logprobs = torch.tensor([0.5]).double().log(), torch.tensor([0.25]).double().log()
    ln2 = math.log(2)
    for estimator, expected in {"k1": ln2, "k2": ln2 * ln2 / 2, "k3": ln2 - 0.5}.items():
        assert kl_estimate(logprobs, ref_logprobs, estimator).item() == pytest.approx(expected, rel=1e-12)


@pytest.fixture
def two_distributions() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, generator=generator, dtype=torch.float64).requires_grad_()
    return logits, torch.randn(7, generator=generator, dtype=torch.float64)


def exact_kl(p_logits: torch.Tensor, q_logits: torch.Tensor) -> torch.Tensor:
    p, q = torch.distributions.Categorical(logits=p_logits), torch.distributions.Categorical(logits=q_logits)
    return torch.distributions.kl_divergence(p, q)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_over_the_whole_support(estimator: str, two_distributions: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, ref_logits = two_distributions
    logprobs = logits.log_softmax(0)
    estimate = (logprobs.exp() * kl_estimate(logprobs, ref_logits.log_softmax(0), estimator)).sum()
    assert estimate.item() == pytest.approx(exact_kl(logits, ref_logits).item(), rel=1e-10)


def test_expected_gradients(two_distributions: tuple[torch.Tensor, torch.Tensor]) -> None:
    """As loss terms: k1 has no gradient on average, k2 that of KL(policy || ref), k3 that of KL(ref || policy)."""
    logits, ref_logits = two_distributions
    expected = {
        "k1": torch.zeros_like(logits),
        "k2": torch.autograd.grad(exact_kl(logits, ref_logits), logits)[0],
        "k3": torch.autograd.grad(exact_kl(ref_logits, logits), logits)[0],
    }
    for estimator, gradient in expected.items():
        logprobs = logits.log_softmax(0)
        weighted = logprobs.detach().exp() * kl_estimate(logprobs, ref_logits.log_softmax(0), estimator)
        torch.testing.assert_close(torch.autograd.grad(weighted.sum(), logits)[0], gradient, rtol=1e-9, atol=1e-12)


def test_k3_keeps_its_digits_near_zero_in_float32() -> None:
    d = torch.tensor([1e-4, -1e-4])
    torch.testing.assert_close(kl_estimate(torch.zeros(2), d, "k3"), torch.full((2,), 5e-9), rtol=1e-2, atol=0.0)


def test_k3_is_finite_and_keeps_the_gradient_where_the_policy_is_the_surer_one() -> None:
    logprobs = torch.tensor([-100.0, 0.0], requires_grad=True)
    estimate = kl_estimate(logprobs, torch.tensor([0.0, -100.0]), "k3")
    estimate.sum().backward()
    assert estimate[0].item() == pytest.approx(math.exp(20) - 21, rel=1e-6)
    assert estimate[1].item() == pytest.approx(99, rel=1e-6)
    assert logprobs.grad is not None and logprobs.grad.tolist() == [0.0, 1.0]


def test_unknown_estimator_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"estimator is 'k4'; use one of k1, k2, k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        (9.0, 0.1 * 1.00512),  # error +0.5, clipped to +0.2; 256 / 10000 = 0.0256
        (6.6, 0.1 * 1.00256),  # error +0.1
        (6.0, 0.1),
        (5.4, 0.1 * 0.99744),
        (-3.0, 0.1 * 0.99488),  # k1 can be negative; clipped to -0.2
    ],
)
def test_controller_step(observed: float, expected: float) -> None:
    controller = KLController(coef=0.1, target=6.0, horizon=10000)
    assert controller.updated(observed, 256).coef == pytest.approx(expected, rel=1e-12)
    assert controller.coef == 0.1


def test_fixed_controller_ignores_everything() -> None:
    controller = KLController(coef=0.1)
    assert controller.updated(math.nan, 10**9) == controller


def test_controller_finds_its_target() -> None:
    """In closed loop with a policy whose KL falls as the coefficient rises, as 0.3 / coef, it settles at 0.05."""
    controller = KLController(coef=0.001, target=6.0, horizon=1000)
    for _ in range(1000):
        controller = controller.updated(0.3 / controller.coef, 128)
    assert controller.coef == pytest.approx(0.05, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"coef": -0.1}, r"coef is -0.1"),
        ({"coef": math.nan}, r"coef is nan"),
        ({"coef": 0.1, "target": 0.0}, r"target is 0.0"),
        ({"coef": 0.1, "horizon": 0}, r"horizon is 0"),
    ],
)
def test_controller_refuses_nonsense(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KLController(**arguments)  # type: ignore[arg-type]


def test_controller_refuses_what_would_break_the_coefficient() -> None:
    controller = KLController(coef=0.1, target=1.0, horizon=100)
    with pytest.raises(ValueError, match="observed_kl is nan"):
        controller.updated(math.nan, 1)
    with pytest.raises(ValueError, match="set horizon above 100"):
        controller.updated(0.0, 500)
    assert controller.updated(0.0, 499).coef > 0
