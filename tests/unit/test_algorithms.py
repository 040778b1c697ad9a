"""AIPO against independent references: values computed by hand, its objective in float64, and exact
expectations.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from losses import F64, gradient, loss_of

from megarl.algorithms.advantages import mean_baseline
from megarl.algorithms.losses import nll_loss
from megarl.algorithms.registry import make_algorithm
from megarl.config.schema import AlgorithmConfig


def test_hand_computed_values():
    logprobs = torch.log(torch.tensor([[0.5, 0.8, 0.1]], dtype=F64)).requires_grad_()
    mu = torch.log(torch.tensor([[0.25, 0.1, 0.2]], dtype=F64))  # ratios 2, 8, 0.5
    advantages = torch.tensor([[1.0, 1.0, -2.0]], dtype=F64)
    out = loss_of(logprobs, mu, advantages, torch.tensor([[True, True, True]]), rho=4.0)
    # -(2 * 1 * log .5 + 4 * 1 * log .8 + .5 * -2 * log .1)
    expected = -(2 * math.log(0.5) + 4 * math.log(0.8) - math.log(0.1))
    assert out.loss.item() == pytest.approx(expected)
    assert gradient(out.loss, logprobs)[0].tolist() == pytest.approx([-2.0, -4.0, 1.0])
    assert out.sums["tokens"] == 3
    assert out.sums["is_ratio"].item() == pytest.approx(10.5)
    assert out.sums["is_ratio_clipped"] == 1
    assert "kl" not in out.sums


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31), rho=st.floats(0.5, 10.0), spread=st.floats(0.1, 30.0))
def test_gradient_is_the_paper_formula(seed: int, rho: float, spread: float):
    """Against d/dlogits of the sum in NumPy, with the softmax's derivative written out, without
    autograd.
    """
    rng = np.random.default_rng(seed)
    b = 2
    s = 5
    v = 7
    logits = torch.tensor(rng.normal(size=(b, s, v)), dtype=F64, requires_grad=True)
    tokens = rng.integers(v, size=(b, s))
    mask = rng.random((b, s)) < 0.7
    advantages = rng.normal(size=(b, s))
    logprobs = torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens)[..., None])[..., 0]
    mu = logprobs.detach().numpy() + spread * rng.normal(size=(b, s))

    out = loss_of(logprobs, torch.tensor(mu), torch.tensor(advantages), torch.tensor(mask), rho=rho)
    loss_gradient = gradient(out.loss, logits).numpy()

    x = logits.detach().numpy()
    softmax = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
    token_probs = np.take_along_axis(softmax, tokens[..., None], -1)[..., 0]
    ratio = token_probs / np.exp(mu)
    grad_log_pi = np.eye(v)[tokens] - softmax  # [b, s, v]
    expected = -(np.minimum(ratio, rho) * advantages * mask)[..., None] * grad_log_pi
    np.testing.assert_allclose(loss_gradient, expected, rtol=1e-9, atol=1e-12)
    assert out.sums["is_ratio_clipped"].item() == ((ratio > rho) & mask).sum()


def test_float32_agrees_with_float64():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 16, 32, generator=generator, dtype=F64)
    mu = torch.log_softmax(
        logits + 0.5 * torch.randn(logits.shape, generator=generator, dtype=F64), -1
    )[..., 3]
    advantages = torch.randn(4, 16, generator=generator, dtype=F64)
    grads = []
    for dtype in (F64, torch.float32):
        x = logits.to(dtype).requires_grad_()
        logprobs = torch.log_softmax(x, -1)[..., 3]
        out = loss_of(
            logprobs,
            mu.to(dtype),
            advantages.to(dtype),
            torch.ones(4, 16, dtype=torch.bool),
            rho=2.0,
        )
        grads.append(gradient(out.loss, x).to(F64))
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-6)


def test_extreme_and_infinite_log_ratios_stay_finite():
    inf = math.inf
    logprobs = torch.tensor([[-1.0, -1.0, -inf, -inf, -700.0, 0.0]], requires_grad=True)
    mu = torch.tensor([[-1e30, -inf, -1.0, -inf, 0.0, -800.0]])
    out = loss_of(logprobs, mu, torch.ones(1, 6), torch.ones(1, 6, dtype=torch.bool), rho=4.0)
    assert torch.isfinite(out.loss) and all(torch.isfinite(value) for value in out.sums.values())
    assert gradient(out.loss, logprobs)[0].tolist() == pytest.approx(
        [-4.0, -4.0, 0.0, 0.0, 0.0, -4.0]
    )
    assert out.sums["is_ratio_clipped"] == 3


def test_masked_garbage_does_not_reach_loss_or_gradient():
    nan = math.nan
    logprobs = torch.tensor([[nan, -0.5, -math.inf]], requires_grad=True)
    garbage = torch.tensor([[nan, -0.5, math.inf]])
    out = loss_of(
        logprobs,
        garbage,
        torch.tensor([[nan, 2.0, nan]]),
        torch.tensor([[False, True, False]]),
        garbage,
        kl_coef=0.1,
    )
    assert out.loss.item() == pytest.approx(1.0)
    assert gradient(out.loss, logprobs)[0].tolist() == [0.0, -2.0, 0.0]
    assert out.sums["tokens"] == 1


@pytest.mark.parametrize("place", ["logprobs", "mu", "advantages"])
def test_nan_on_a_trained_token_is_not_hidden(place: str):
    tensors = {
        "logprobs": torch.tensor([[-1.0]]),
        "mu": torch.tensor([[-1.0]]),
        "advantages": torch.tensor([[1.0]]),
    }
    tensors[place] = torch.tensor([[math.nan]])
    out = loss_of(tensors["logprobs"], tensors["mu"], tensors["advantages"], torch.tensor([[True]]))
    assert torch.isnan(out.loss)


@pytest.mark.parametrize("seed", range(3))
def test_kl_gradient_is_that_of_the_exact_kl(seed: int):
    """The sum over a small categorical of mu(y) times the gradient at y, against autograd of KL(pi
    || ref).
    """
    generator = torch.Generator().manual_seed(seed)
    theta, mu_logits, reference_logits = torch.randn(3, 6, generator=generator, dtype=F64)
    theta.requires_grad_()
    mu = torch.log_softmax(mu_logits, 0)
    reference = torch.log_softmax(reference_logits, 0)

    log_pi = torch.log_softmax(theta, 0)
    exact = (log_pi.exp() * (log_pi - reference)).sum()
    exact_gradient = gradient(exact, theta)

    expected_gradient = torch.zeros_like(theta)
    expected_value = 0.0
    for y in range(6):
        logprobs = torch.log_softmax(theta, 0)[y].view(1, 1)
        out = loss_of(
            logprobs,
            mu[y].view(1, 1),
            torch.zeros(1, 1, dtype=F64),
            torch.ones(1, 1, dtype=torch.bool),
            reference[y].view(1, 1),
            rho=1e9,
            kl_coef=1.0,
        )
        expected_gradient += mu[y].exp() * gradient(out.loss, theta)
        expected_value += (mu[y].exp() * out.sums["kl"]).item()
        assert out.sums["kl"] >= 0
    torch.testing.assert_close(expected_gradient, exact_gradient, rtol=1e-10, atol=1e-12)
    assert expected_value == pytest.approx(exact.item(), rel=1e-10)


def test_importance_weights_make_the_gradient_unbiased():
    """With a large rho, the expectation under mu of AIPO's gradient equals the exact gradient of
    E_pi[A]; with rho 1 it does not.
    """
    generator = torch.Generator().manual_seed(5)
    theta, mu_logits, advantage = torch.randn(3, 5, generator=generator, dtype=F64)
    theta.requires_grad_()
    mu = torch.log_softmax(mu_logits, 0)
    exact = gradient(-(torch.softmax(theta, 0) * advantage).sum(), theta)

    def expectation(rho: float) -> torch.Tensor:
        total = torch.zeros_like(theta)
        for y in range(5):
            logprobs = torch.log_softmax(theta, 0)[y].view(1, 1)
            out = loss_of(
                logprobs,
                mu[y].view(1, 1),
                advantage[y].view(1, 1),
                torch.ones(1, 1, dtype=torch.bool),
                rho=rho,
            )
            total += mu[y].exp() * gradient(out.loss, theta)
        return total

    torch.testing.assert_close(expectation(1e9), exact, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(expectation(1.0), exact, rtol=1e-2)


def test_kl_without_a_reference_is_refused():
    one = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="kl_coef is 0.5"):
        loss_of(one, one, one, torch.ones(1, 1, dtype=torch.bool), kl_coef=0.5)


def test_group_advantages_subtract_the_mean_of_the_prompt():
    advantages = mean_baseline(torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]]))
    assert advantages.tolist() == [[0.5, -0.5, -0.5, 0.5], [0.75, -0.25, -0.25, -0.25]]


@settings(max_examples=50, deadline=None)
@given(value=st.floats(-10, 10), n=st.integers(1, 9))
def test_equal_rewards_have_exactly_zero_advantage(value: float, n: int):
    assert mean_baseline(torch.full((2, n), value, dtype=F64)).count_nonzero() == 0


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.floats(-5, 5, width=32), min_size=4, max_size=4), min_size=1, max_size=5)
)
def test_advantages_against_numpy(rewards: list[list[float]]):
    r = np.array(rewards)
    np.testing.assert_allclose(
        mean_baseline(torch.tensor(r)).numpy(), r - r.mean(1, keepdims=True), atol=1e-12
    )


def test_nll():
    logprobs = torch.tensor([-1.0, -2.0, math.nan], requires_grad=True)
    out = nll_loss(logprobs, SimpleNamespace(loss_mask=torch.tensor([True, True, False])))
    assert out.loss.item() == 3.0 and out.sums["tokens"] == 2
    assert gradient(out.loss, logprobs).tolist() == [-1.0, -1.0, 0.0]


def test_algorithm_objects_read_the_microbatch():
    microbatch = SimpleNamespace(
        boundaries=torch.tensor([0, 2], dtype=torch.int32),
        mu_logprobs=torch.tensor([-2.0, -1.0]),
        advantages=torch.tensor([1.0, 3.0]),
        loss_mask=torch.tensor([True, False]),
        reference_logprobs=None,
        proximal_logprobs=None,
    )
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    aipo = make_algorithm(AlgorithmConfig(name="aipo", rho=2.0))
    assert gradient(aipo.loss(logprobs, microbatch).loss, logprobs).tolist() == pytest.approx(
        [-2.0, 0.0]
    )
    assert gradient(nll_loss(logprobs, microbatch).loss, logprobs).tolist() == [-1.0, 0.0]
    assert torch.equal(aipo.advantages(torch.tensor([[1.0, 0.0]])), torch.tensor([[0.5, -0.5]]))


def test_kl_penalty_keeps_zero_advantages():
    plain = make_algorithm(AlgorithmConfig())
    penalised = make_algorithm(AlgorithmConfig(kl_coef=0.1))
    assert plain.skip_zero and not plain.needs_reference
    assert not penalised.skip_zero and penalised.needs_reference
    assert not make_algorithm(AlgorithmConfig(skip_zero_advantage=False)).skip_zero
