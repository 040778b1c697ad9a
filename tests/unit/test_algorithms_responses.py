"""Losses of whole responses against their papers' formulas, written out in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from losses import F64, assert_same_gradient, gradient, loss_of
from test_algorithms_relatives import logprobs_of, ppo_objective, random_batch

from megarl.algorithms.advantages import best
from megarl.algorithms.losses import RuleInputs, clipped, lag_weights
from megarl.algorithms.registry import make_algorithm
from megarl.config.schema import AlgorithmConfig


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    spread=st.floats(0.01, 1.0),
    low=st.floats(0.0, 0.95),
    high=st.floats(1.05, 2.5),
)
@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("ratio", ["behavior", "proximal"])
def test_proximal_rloo_has_the_gradient_of_its_objective(
    ratio: str, dual_clip: float | None, seed: int, spread: float, low: float, high: float
):
    """Equation 1 of arXiv:2410.18252, differentiated through the product of a response's token
    ratios.
    """
    logits, tokens, old, advantages, mask = random_batch(seed, spread)
    mu = old if ratio == "behavior" else old - 0.3
    logprobs = logprobs_of(logits, tokens)
    ratios = ((logprobs - old) * mask).sum(1).exp()
    a = advantages[:, 0]
    least = torch.minimum(ratios * a, ratios.clamp(low, high) * a)
    objective = ppo_objective(ratios, a, low, high) if dual_clip else least
    out = loss_of(
        logprobs,
        mu,
        advantages,
        mask,
        proximal=old,
        name="proximal_rloo",
        rho_min=low,
        rho=high,
        ratio=ratio,
        dual_clip=dual_clip,
    )
    assert_same_gradient(out.loss, -objective.sum(), logits)


def test_rloo_is_reinforce_of_whole_responses():
    """The loss of appendix B (k = 2): half of each response's summed log-prob, times its reward
    minus the other's.
    """
    algorithm = make_algorithm(AlgorithmConfig(name="rloo"))
    rewards = torch.tensor([[3.0, 1.0], [0.5, 2.5], [1.0, 1.0]], dtype=F64)
    logits, tokens, mu, _, mask = random_batch(2)
    logprobs = logprobs_of(logits, tokens)
    out = loss_of(
        logprobs, mu, algorithm.advantages(rewards).view(6, 1).expand(6, 7), mask, name="rloo"
    )
    log_pi = (logprobs * mask).sum(1)
    expected = (
        sum(
            -0.5 * (log_pi[i] * (r - s) + log_pi[i + 1] * (s - r))
            for i, (r, s) in zip((0, 2, 4), rewards.tolist())
        )
        / 3
    )
    assert algorithm.denominator(tokens=99, samples=6) == 6
    torch.testing.assert_close(out.loss / 6, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        gradient(out.loss / 6, logits), gradient(expected, logits), rtol=1e-10, atol=1e-14
    )


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=3, max_size=3), min_size=1, max_size=5
    )
)
def test_best_of_n_learns_only_the_first_best(rewards: list[list[float]]):
    advantages = best(torch.tensor(rewards, dtype=F64))
    expected = np.zeros((len(rewards), 3))
    for row, of_prompt in zip(expected, rewards):
        row[of_prompt.index(max(of_prompt))] = 3.0
    assert advantages.tolist() == expected.tolist()


def test_best_of_n_is_the_mean_negative_log_likelihood():
    algorithm = make_algorithm(AlgorithmConfig(name="best_of_n"))
    assert algorithm.skip_zero
    logits, tokens, mu, _, mask = random_batch(3)
    logprobs = logprobs_of(logits, tokens)
    advantages = (
        algorithm.advantages(torch.tensor([[0.0, 1.0, 1.0], [2.0, -1.0, 0.0]], dtype=F64))
        .view(6, 1)
        .expand(6, 7)
    )
    out = loss_of(logprobs, mu, advantages, mask, name="best_of_n")
    expected = -((logprobs * mask)[1].sum() + (logprobs * mask)[3].sum()) / 2
    torch.testing.assert_close(
        out.loss / algorithm.denominator(tokens=99, samples=6), expected, rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("name", ["grpo", "gspo", "proximal_rloo"])
def test_dual_clip_cuts_off_large_ratios(name: str):
    ratios = torch.tensor([[1.9], [2.1], [3.1], [50.0]], dtype=F64)
    logprobs = torch.full((4, 1), -1.0, dtype=F64, requires_grad=True)
    true = torch.ones(4, 1, dtype=torch.bool)

    def weights(dual_clip: float | None) -> list[float]:
        out = loss_of(
            logprobs,
            -1.0 - ratios.log(),
            -torch.ones(4, 1, dtype=F64),
            true,
            name=name,
            dual_clip=dual_clip,
            loss_mean="token",
        )
        return gradient(out.loss, logprobs)[:, 0].tolist()

    assert weights(2.0) == pytest.approx([1.9, 0, 0, 0])
    assert weights(None) == pytest.approx(
        [1.9, 2.1, 0, 0] if name == "grpo" else [1.9, 2.1, 3.1, 50.0]
    )
    assert weights(10.0) == pytest.approx([1.9, 2.1, 3.1, 0])


@pytest.mark.parametrize("name", ["rloo", "best_of_n", "proximal_rloo"])
@pytest.mark.parametrize("seed", range(3))
def test_prompts_and_samples_may_be_permuted(name: str, seed: int):
    """The gradient of the whole batch stays the same."""
    rng = np.random.default_rng(seed)
    algorithm = make_algorithm(AlgorithmConfig(name=name))
    logits, tokens, mu, _, mask = random_batch(seed)
    logprobs = logprobs_of(logits, tokens)
    rewards = torch.tensor(rng.permutation(6.0 + np.arange(6))).view(2, 3)
    order = [int(3 * g + i) for g in rng.permutation(2) for i in rng.permutation(3)]

    def gradient_of(order: list[int]) -> torch.Tensor:
        advantages = algorithm.advantages(rewards.flatten()[order].view(2, 3))
        advantages = advantages.view(6, 1).expand(6, 7)
        out = loss_of(logprobs[order], mu[order], advantages, mask[order], name=name)
        return gradient(out.loss, logits)

    in_order = gradient_of(list(range(6)))
    torch.testing.assert_close(gradient_of(order), in_order, rtol=1e-12, atol=1e-14)


def test_unbounded_ratio_stays_finite():
    logprobs = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    mu = torch.tensor([[-1e30, -900.0]])
    out = loss_of(
        logprobs, mu, -torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool), name="proximal_rloo"
    )
    assert gradient(out.loss, logprobs)[0].tolist() == pytest.approx([math.exp(20)] * 2)


def test_products_of_ratios_are_those_of_all_their_tokens():
    """A token beyond the bound of a single ratio, and one that makes up for it: the product counts
    both.
    """
    mask = torch.ones(4, dtype=torch.bool)
    boundaries = torch.tensor([0, 2, 4], dtype=torch.int32)
    lags = torch.tensor([-30.0, 25.0, -math.inf, 1.0])
    weight, beyond, _ = lag_weights(lags, mask, boundaries, 0.0, 5.0, "sequence", "truncate")
    torch.testing.assert_close(weight, torch.tensor([math.exp(-5.0)] * 2 + [0.0] * 2))
    assert not beyond.any()


def test_ratios_cut_at_the_last_bound_count_as_clipped():
    ratios = torch.tensor([19.0, 21.0])
    minus = -torch.ones(2)
    inputs = RuleInputs(ratios, minus, minus < 0, torch.tensor([0, 2]), 0.8, 1.2)
    weight, clipped_tokens, _ = clipped(inputs, dual_clip=math.inf)
    assert clipped_tokens.tolist() == [False, True]
    assert weight.tolist() == ratios.clamp(max=20).exp().tolist()
