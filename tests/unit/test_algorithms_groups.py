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
        of_pair = [(rewards[i] - rewards[j], log_ratio[i] - log_ratio[j]) for i, j in pairs]
        return sum((beta / 2 * dl - dr) * dl for dr, dl in of_pair) / len(pairs) / 2
    if min(rewards) == max(rewards):
        return 0 * log_ratio[0]
    gap = log_ratio[rewards.index(max(rewards))] - log_ratio[rewards.index(min(rewards))]
    return (
        -torch.log(torch.sigmoid(beta * gap))
        if name == "online_dpo"
        else (gap - 1 / (2 * beta)) ** 2
    )


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), rewards=REWARDS, beta=st.floats(0.01, 2.0))
@pytest.mark.parametrize("name", NAMES)
def test_value_and_gradient_are_the_published_losses(
    name: str, seed: int, rewards: list[list[float]], beta: float
):
    """For the mean over prompts, by autograd through the log-probs of all responses at once."""
    logits, tokens, reference, _, mask = random_batch(seed)
    logprobs = logprobs_of(logits, tokens)
    algorithm = make_algorithm(AlgorithmConfig(name=name, beta=beta))
    log_ratio = ((logprobs - reference) * mask).sum(1).view(2, 3)
    expected = sum(published(name, r, l, beta) for r, l in zip(rewards, log_ratio)) / 2

    assert algorithm.group_loss is not None
    found = algorithm.group_loss.weigh(
        algorithm.advantages(torch.tensor(rewards, dtype=F64)), log_ratio.detach()
    )
    assert found.loss / 2 == pytest.approx(expected.item(), rel=1e-10, abs=1e-12)
    out = loss_of(
        logprobs, reference, found.weights.view(6, 1).expand(6, 7), mask, name=name, beta=beta
    )
    got = gradient(out.loss / algorithm.denominator(tokens=99, samples=6), logits)
    torch.testing.assert_close(got, gradient(expected, logits), rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_finite_differences_of_the_loss(name: str):
    loss = make_algorithm(AlgorithmConfig(name=name, beta=0.3)).group_loss
    assert loss is not None
    generator = torch.Generator().manual_seed(0)
    step = 1e-5
    advantages = best_and_worst(torch.tensor([[0.0, 1.0, 2.0]], dtype=F64))
    at = torch.randn(1, 3, generator=generator, dtype=F64)
    if name == "copg":
        advantages = torch.tensor([[-1.5, 0.0, 1.5]], dtype=F64)
    for i in range(3):
        move = step * torch.eye(3, dtype=F64)[i]
        slope = (
            loss.weigh(advantages, at + move).loss - loss.weigh(advantages, at - move).loss
        ) / (2 * step)
        assert -3 * slope == pytest.approx(
            loss.weigh(advantages, at).weights[0, i].item(), rel=1e-6, abs=1e-8
        )


def test_copgs_gradient_is_rloos_with_the_kl_divergence_in_the_reward():
    """The reward is R - beta log(pi / ref), at any log-ratio.

    So it is plain RLOO on policy, where the reference is the policy.
    """
    rewards = torch.tensor([[1.0, 0.0, 0.5, 3.0]], dtype=F64)
    log_ratio = torch.tensor([[0.3, -2.0, 1.0, 0.0]], dtype=F64)
    rloo = make_algorithm(AlgorithmConfig(name="rloo")).advantages
    copg = make_algorithm(AlgorithmConfig(name="copg", beta=0.2))
    assert copg.group_loss is not None
    for ratio in (log_ratio, torch.zeros_like(log_ratio)):
        found = copg.group_loss.weigh(copg.advantages(rewards), ratio).weights
        torch.testing.assert_close(found, rloo(rewards - 0.2 * ratio), rtol=1e-12, atol=1e-15)


def test_copg_without_beta_is_rloo():
    """CoPG as in arXiv:2410.18252, appendix B: log(pi / mu) A has the gradient of log(pi) A."""
    config = AlgorithmConfig(name="copg", beta=0.0)
    assert list(problems(config)) == [] and needs_reference(config) is None
    logits, tokens, mu, advantages, mask = random_batch(1)
    logprobs = logprobs_of(logits, tokens)
    copg, rloo = (
        loss_of(logprobs, mu, advantages, mask, name=name, **more)
        for name, more in (("copg", {"beta": 0.0}), ("rloo", {}))
    )
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
    found = algorithm.group_loss.weigh(advantages, log_ratio)
    assert found.sums == {
        "pairs": 2.0,
        "pair_margin": pytest.approx(0.1 * (1.0 - 1.0)),
        "pair_accuracy": 1.0,
    }
    assert found.weights[0].tolist() == [0, 0, 0] and found.weights[:, 2].tolist() == [0, 0, 0]
    metrics = algorithm.metrics({"tokens": 10.0, "prompts": 3.0, **found.sums, "pair_margin": 0.3})
    assert metrics["pairs/fraction"] == pytest.approx(2 / 3)
    assert metrics["pairs/margin"] == pytest.approx(0.15) and metrics["pairs/accuracy"] == 0.5
    none = algorithm.metrics(
        {"tokens": 0.0, "prompts": 3.0, "pairs": 0.0, "pair_margin": 0.0, "pair_accuracy": 0.0}
    )
    assert none["pairs/fraction"] == 0 and math.isnan(none["pairs/margin"])


def test_dpos_weights_by_hand():
    """beta sigmoid(-margin) for the best, minus the same for the worst, in a mean over prompts."""
    algorithm = make_algorithm(AlgorithmConfig(name="online_dpo", beta=0.5))
    assert algorithm.group_loss is not None
    found = algorithm.group_loss.weigh(
        algorithm.advantages(torch.tensor([[0.0, 1.0]], dtype=F64)),
        torch.tensor([[1.0, 3.0]], dtype=F64),
    )
    weight = 2 * 0.5 / (1 + math.exp(1.0))
    assert found.weights[0].tolist() == pytest.approx([-weight, weight])
    assert found.loss == pytest.approx(-math.log(1 / (1 + math.exp(-1.0))))


@pytest.mark.parametrize("name", NAMES)
def test_a_hopeless_margin_stays_finite_and_nan_is_not_hidden(name: str):
    algorithm = make_algorithm(AlgorithmConfig(name=name))
    assert algorithm.group_loss is not None
    advantages = algorithm.advantages(torch.tensor([[0.0, 1.0]], dtype=F64))
    for gap in (-1e6, 1e6):
        found = algorithm.group_loss.weigh(advantages, torch.tensor([[0.0, gap]], dtype=F64))
        assert math.isfinite(found.loss) and torch.isfinite(found.weights).all()
    found = algorithm.group_loss.weigh(advantages, torch.tensor([[0.0, math.nan]], dtype=F64))
    assert math.isnan(found.loss) and torch.isnan(found.weights).any()


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
    moved = [each[prompts][:, samples] for each in (rewards, log_ratio)]
    other = algorithm.group_loss.weigh(algorithm.advantages(moved[0]), moved[1])
    torch.testing.assert_close(
        other.weights, plain.weights[prompts][:, samples], rtol=1e-12, atol=1e-15
    )
    assert other.loss == pytest.approx(plain.loss, rel=1e-12) and other.sums == pytest.approx(
        plain.sums
    )
