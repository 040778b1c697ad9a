"""The KL penalty, in the loss and in the reward, against exact divergences of a small categorical
in float64.
"""

from __future__ import annotations

import pytest
import torch
from losses import F64, gradient, loss_of
from test_algorithms_relatives import logprobs_of, random_batch

from megarl.algorithms.losses import ESTIMATORS
from megarl.algorithms.recipes import problems
from megarl.algorithms.registry import make_algorithm
from megarl.config.schema import AlgorithmConfig


def categoricals(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Differentiable logits [6], their log-probs, and a reference's log-probs."""
    theta, reference = torch.randn(2, 6, generator=torch.Generator().manual_seed(seed), dtype=F64)
    theta.requires_grad_()
    return theta, torch.log_softmax(theta, 0), torch.log_softmax(reference, 0)


@pytest.mark.parametrize("seed", range(3))
def test_estimators_have_the_mean_of_the_divergence(seed: int):
    """The means of k1 and k3 are the divergence. By hand, values equal Schulman's formulas."""
    _, log_pi, log_ref = categoricals(seed)
    pi = log_pi.exp()
    r = (log_ref - log_pi).exp()
    written = {"k1": -r.log(), "k2": r.log() ** 2 / 2, "k3": (r - 1) - r.log()}
    for name, estimator in ESTIMATORS.items():
        torch.testing.assert_close(
            estimator(log_pi - log_ref), written[name], rtol=1e-10, atol=1e-14
        )
    exact = (pi * (log_pi - log_ref)).sum()
    for name in ("k1", "k3"):
        torch.testing.assert_close(
            (pi * ESTIMATORS[name](log_pi - log_ref)).sum(), exact, rtol=1e-10, atol=0
        )
    assert ESTIMATORS["k3"](torch.tensor(-900.0)).isfinite()


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_gradients_of_estimators_at_any_difference(name: str):
    """The formulas are differentiated in float64.

    Where k3 is bounded, it still pulls to the reference and is never infinite.
    """
    formulas = {"k1": lambda d: d, "k2": lambda d: d**2 / 2, "k3": lambda d: (-d).exp() - 1 + d}
    d = torch.tensor(
        [-900.0, -80.0, -20.1, -20.0, -19.9, -3.0, -1e-3, 1e-3, 3.0, 19.9, 20.1, 80.0, 900.0],
        dtype=F64,
    )
    d.requires_grad_()
    estimated = gradient(ESTIMATORS[name](d).sum(), d)
    exact = gradient(formulas[name](d).sum(), d)
    inside = d.detach() >= -20
    torch.testing.assert_close(estimated[inside], exact[inside], rtol=1e-12, atol=0)
    assert torch.equal(estimated.sign(), exact.sign())
    values = ESTIMATORS[name](d.detach().float())
    assert values.isfinite().all()
    assert torch.equal(values[:6].argsort(), formulas[name](d.detach())[:6].argsort()), (
        "farther off costs more"
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("estimator", ["k2", "k3", None])
def test_gradients_of_the_penalty_in_the_loss(seed: int, estimator: str | None):
    """In the mean over the policy's tokens, k2 has the gradient of KL(pi || ref), and k3 that of
    KL(ref || pi). k2 is the default.
    """
    theta, log_pi, log_ref = categoricals(seed)
    zero = torch.zeros(1, 1, dtype=F64)
    true = torch.ones(1, 1, dtype=torch.bool)
    mean = torch.zeros_like(theta)
    for y in range(6):
        logprob = log_pi[y].view(1, 1)
        out = loss_of(
            logprob,
            logprob.detach(),
            zero,
            true,
            log_ref[y].view(1, 1),
            kl_coef=0.3,
            kl_estimator=estimator,
        )
        mean += log_pi[y].exp().detach() * gradient(out.loss, theta)
    reverse = (log_pi.exp() * (log_pi - log_ref)).sum()
    forward = (log_ref.exp() * (log_ref - log_pi)).sum()
    torch.testing.assert_close(
        mean,
        0.3 * gradient(forward if estimator == "k3" else reverse, theta),
        rtol=1e-10,
        atol=1e-13,
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("estimator", ["k1", "k3", None])
def test_penalised_rewards_give_the_divergence_gradient(seed: int, estimator: str | None):
    """In the mean over responses of one token, each weighted by its penalty.

    With k1, the default, this is exactly grad KL(pi || ref). k3 is unbiased for the value too, but
    not for this gradient.
    """
    theta, log_pi, log_ref = categoricals(seed)
    algorithm = make_algorithm(
        AlgorithmConfig(name="rloo", kl_coef=0.3, kl="reward", kl_estimator=estimator)
    )
    assert algorithm.penalizes_rewards and algorithm.needs_reference and not algorithm.skip_zero
    mean = torch.zeros_like(theta)
    for y in range(6):
        penalty = algorithm.penalty(log_pi[y : y + 1].detach(), log_ref[y : y + 1])
        mean += log_pi[y].exp().detach() * penalty * gradient(log_pi[y], theta)
    exact = 0.3 * gradient((log_pi.exp() * (log_pi - log_ref)).sum(), theta)
    assert torch.allclose(mean, exact, rtol=1e-10, atol=1e-13) == (estimator != "k3")


def test_penalty_of_a_response_is_summed_over_its_tokens():
    config = AlgorithmConfig(name="rloo", kl_coef=0.5, kl="reward", kl_estimator="k2")
    penalty = make_algorithm(config).penalty(
        torch.tensor([0.0, -1.0, -2.0]), torch.tensor([0.0, -2.0, -4.0])
    )
    assert penalty == pytest.approx(0.5 * (1 + 4) / 2)


@pytest.mark.parametrize("name", ["rloo", "grpo"])
def test_penalty_in_the_reward_is_not_in_the_loss(name: str):
    logits, tokens, mu, advantages, mask = random_batch(0)
    logprobs = logprobs_of(logits, tokens)
    plain = loss_of(logprobs, mu, advantages, mask, name=name)
    penalised = loss_of(
        logprobs, mu, advantages, mask, mu - 0.2, name=name, kl_coef=0.3, kl="reward"
    )
    assert torch.equal(gradient(plain.loss, logits), gradient(penalised.loss, logits))
    assert "kl" in penalised.sums and "kl" not in plain.sums


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", None])
def test_reward_takes_any_estimate(estimator: str | None):
    config = AlgorithmConfig(name="grpo", kl_coef=0.1, kl="reward", kl_estimator=estimator)
    assert list(problems(config)) == []
