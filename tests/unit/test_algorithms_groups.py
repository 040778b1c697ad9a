"""Losses over a prompt's responses, against their papers' formulas, pair by pair in float64."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from losses import F64, gradient, loss_of
from test_algorithms_relatives import logprobs_of, random_batch

from megarl.algorithms.advantages import best_and_worst
from megarl.algorithms.recipes import needs_reference, problems
from megarl.algorithms.registry import make_algorithm
from megarl.config.schema import AlgorithmConfig

NAMES = ["online_dpo", "ipo", "copg"]
REWARDS = st.lists(
    st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0]), min_size=3, max_size=3), min_size=2, max_size=2
)


def published(
    name: str, rewards: list[float], log_ratio: torch.Tensor, beta: float
) -> torch.Tensor:
    """A prompt's loss from the log-ratios [n] of its responses."""
    if name == "copg":
        pairs = list(combinations(range(len(rewards)), 2))
        total = torch.zeros((), dtype=F64)
        for i, j in pairs:
            gap = log_ratio[i] - log_ratio[j]
            total = total + (beta / 2 * gap - (rewards[i] - rewards[j])) * gap
        return total / len(pairs) / 2
    if min(rewards) == max(rewards):
        return 0 * log_ratio[0]
    gap = log_ratio[rewards.index(max(rewards))] - log_ratio[rewards.index(min(rewards))]
    if name == "online_dpo":
        return -torch.log(torch.sigmoid(beta * gap))
    return (gap - 1 / (2 * beta)) ** 2


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), rewards=REWARDS, beta=st.floats(0.01, 2.0))
@pytest.mark.parametrize("name", NAMES)
def test_value_and_gradient_are_as_published(
    name: str, seed: int, rewards: list[list[float]], beta: float
):
    """For the mean over prompts, by autograd through the log-probs of all responses at once."""
    logits, tokens, reference, _, mask = random_batch(seed)
    logprobs = logprobs_of(logits, tokens)
    algorithm = make_algorithm(AlgorithmConfig(name=name, beta=beta))
    log_ratio = ((logprobs - reference) * mask).sum(1).view(2, 3)
    expected = sum(published(name, r, l, beta) for r, l in zip(rewards, log_ratio)) / 2

    assert algorithm.group_loss is not None
    group_loss = algorithm.group_loss.weigh(
        algorithm.advantages(torch.tensor(rewards, dtype=F64)), log_ratio.detach()
    )
    assert group_loss.loss / 2 == pytest.approx(expected.item(), rel=1e-10, abs=1e-12)
    out = loss_of(
        logprobs, reference, group_loss.weights.view(6, 1).expand(6, 7), mask, name=name, beta=beta
    )
    loss_gradient = gradient(out.loss / algorithm.denominator(tokens=99, samples=6), logits)
    torch.testing.assert_close(loss_gradient, gradient(expected, logits), rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_finite_differences_of_the_loss(name: str):
    loss = make_algorithm(AlgorithmConfig(name=name, beta=0.3)).group_loss
    assert loss is not None
    generator = torch.Generator().manual_seed(0)
    step = 1e-5
    advantages = best_and_worst(torch.tensor([[0.0, 1.0, 2.0]], dtype=F64))
    log_ratio = torch.randn(1, 3, generator=generator, dtype=F64)
    if name == "copg":
        advantages = torch.tensor([[-1.5, 0.0, 1.5]], dtype=F64)
    for i in range(3):
        move = step * torch.eye(3, dtype=F64)[i]
        above = loss.weigh(advantages, log_ratio + move).loss
        below = loss.weigh(advantages, log_ratio - move).loss
        slope = (above - below) / (2 * step)
        weight = loss.weigh(advantages, log_ratio).weights[0, i].item()
        assert -3 * slope == pytest.approx(weight, rel=1e-6, abs=1e-8)


def test_copg_is_rloo_with_the_kl_divergence_in_the_reward():
    """The reward is R - beta log(pi / ref), at any log-ratio.

    So it is plain RLOO on policy, where the reference is the policy.
    """
    rewards = torch.tensor([[1.0, 0.0, 0.5, 3.0]], dtype=F64)
    log_ratio = torch.tensor([[0.3, -2.0, 1.0, 0.0]], dtype=F64)
    rloo = make_algorithm(AlgorithmConfig(name="rloo")).advantages
    copg = make_algorithm(AlgorithmConfig(name="copg", beta=0.2))
    assert copg.group_loss is not None
    for ratio in (log_ratio, torch.zeros_like(log_ratio)):
        weights = copg.group_loss.weigh(copg.advantages(rewards), ratio).weights
        torch.testing.assert_close(weights, rloo(rewards - 0.2 * ratio), rtol=1e-12, atol=1e-15)


def test_copg_without_beta_is_rloo():
    """CoPG as in arXiv:2410.18252, appendix B: log(pi / mu) A has the gradient of log(pi) A."""
    config = AlgorithmConfig(name="copg", beta=0.0)
    assert list(problems(config)) == [] and needs_reference(config) is None
    logits, tokens, mu, advantages, mask = random_batch(1)
    logprobs = logprobs_of(logits, tokens)
    copg = loss_of(logprobs, mu, advantages, mask, name="copg", beta=0.0)
    rloo = loss_of(logprobs, mu, advantages, mask, name="rloo")
    assert torch.equal(gradient(copg.loss, logits), gradient(rloo.loss, logits))
    assert make_algorithm(config).group_loss is None and make_algorithm(config).skip_zero


@pytest.mark.parametrize("name", ["online_dpo", "ipo"])
def test_prompts_without_a_pair_are_counted_and_add_nothing(name: str):
    algorithm = make_algorithm(AlgorithmConfig(name=name))
    assert algorithm.skip_zero and algorithm.needs_reference and algorithm.group_loss is not None
    rewards = torch.tensor([[1.0, 1.0, 1.0], [2.0, 0.0, 0.0], [0.0, 1.0, 1.0]], dtype=F64)
    advantages = algorithm.advantages(rewards)
    assert advantages.tolist() == [[0, 0, 0], [3, -3, 0], [-3, 3, 0]], "ties: the first"
    log_ratio = torch.tensor([[1.0, 2.0, 3.0], [0.5, -0.5, 9.0], [2.0, 1.0, 9.0]], dtype=F64)
    group_loss = algorithm.group_loss.weigh(advantages, log_ratio)
    assert group_loss.sums == {
        "pairs": 2.0,
        "pair_margin": pytest.approx(0.1 * (1.0 - 1.0)),
        "pair_accuracy": 1.0,
    }
    assert group_loss.weights[0].tolist() == [0, 0, 0]
    assert group_loss.weights[:, 2].tolist() == [
        0,
        0,
        0,
    ]
    metrics = algorithm.metrics(
        {"tokens": 10.0, "prompts": 3.0, **group_loss.sums, "pair_margin": 0.3}
    )
    assert metrics["pairs/fraction"] == pytest.approx(2 / 3)
    assert metrics["pairs/margin"] == pytest.approx(0.15) and metrics["pairs/accuracy"] == 0.5
    no_pairs = algorithm.metrics(
        {"tokens": 0.0, "prompts": 3.0, "pairs": 0.0, "pair_margin": 0.0, "pair_accuracy": 0.0}
    )
    assert no_pairs["pairs/fraction"] == 0 and math.isnan(no_pairs["pairs/margin"])


def test_weights_of_dpo_by_hand():
    """beta sigmoid(-margin) for the best, minus the same for the worst, in a mean over prompts."""
    algorithm = make_algorithm(AlgorithmConfig(name="online_dpo", beta=0.5))
    assert algorithm.group_loss is not None
    group_loss = algorithm.group_loss.weigh(
        algorithm.advantages(torch.tensor([[0.0, 1.0]], dtype=F64)),
        torch.tensor([[1.0, 3.0]], dtype=F64),
    )
    weight = 2 * 0.5 / (1 + math.exp(1.0))
    assert group_loss.weights[0].tolist() == pytest.approx([-weight, weight])
    assert group_loss.loss == pytest.approx(-math.log(1 / (1 + math.exp(-1.0))))


@pytest.mark.parametrize("name", NAMES)
def test_hopeless_margin_stays_finite_and_nan_is_shown(name: str):
    algorithm = make_algorithm(AlgorithmConfig(name=name))
    assert algorithm.group_loss is not None
    advantages = algorithm.advantages(torch.tensor([[0.0, 1.0]], dtype=F64))
    for gap in (-1e6, 1e6):
        group_loss = algorithm.group_loss.weigh(advantages, torch.tensor([[0.0, gap]], dtype=F64))
        assert math.isfinite(group_loss.loss) and torch.isfinite(group_loss.weights).all()
    group_loss = algorithm.group_loss.weigh(advantages, torch.tensor([[0.0, math.nan]], dtype=F64))
    assert math.isnan(group_loss.loss) and torch.isnan(group_loss.weights).any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_prompts_and_samples_may_be_permuted(name: str, seed: int):
    rng = np.random.default_rng(seed)
    algorithm = make_algorithm(AlgorithmConfig(name=name))
    assert algorithm.group_loss is not None
    rewards, log_ratio = torch.tensor(rng.normal(size=(2, 2, 3)))
    prompts = rng.permutation(2)
    samples = rng.permutation(3)
    plain = algorithm.group_loss.weigh(algorithm.advantages(rewards), log_ratio)
    permuted = algorithm.group_loss.weigh(
        algorithm.advantages(rewards[prompts][:, samples]), log_ratio[prompts][:, samples]
    )
    torch.testing.assert_close(
        permuted.weights, plain.weights[prompts][:, samples], rtol=1e-12, atol=1e-15
    )
    assert permuted.loss == pytest.approx(plain.loss, rel=1e-12)
    assert permuted.sums == pytest.approx(plain.sums)
