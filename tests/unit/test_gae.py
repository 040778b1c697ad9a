"""A critic's advantages, compared with their definition, and its loss."""

from __future__ import annotations

import math
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from losses import packed_loss_of

from megarl.algorithms.recipes import (
    has_critic,
    needs_groups_to_differ,
    needs_one_sequence,
    problems,
)
from megarl.algorithms.registry import make_algorithm
from megarl.config.algorithms import ALGORITHMS
from megarl.config.schema import AlgorithmConfig
from megarl.critic.executor import value_loss
from megarl.critic.losses import Gae, Moments, Truncation


def by_definition(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """The definition's double sum."""
    length = len(rewards)
    following = [*values[1:], 0.0]
    deltas = [rewards[t] + gamma * following[t] - values[t] for t in range(length)]
    return np.array(
        [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, length)) for t in range(length)]
    )


@given(
    st.lists(st.integers(1, 9), max_size=6), st.floats(0, 1), st.floats(0, 1), st.integers(0, 99)
)
@settings(max_examples=60, deadline=None)
def test_advantages_are_the_double_sum(
    lengths: list[int], gamma: float, lam: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    rewards = [random.normal(size=length) for length in lengths]
    values = [random.normal(size=length) for length in lengths]
    estimates = Gae(gamma, lam, whiten=False).estimates(rewards, values)
    assert [len(estimate.advantages) for estimate in estimates] == lengths
    for estimate, reward, value in zip(estimates, rewards, values, strict=True):
        expected = by_definition(reward, value, gamma, lam)
        np.testing.assert_allclose(estimate.advantages, expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(estimate.returns, expected + value, rtol=0, atol=1e-12)


def vtrace_by_definition(
    rewards: np.ndarray,
    values: np.ndarray,
    ratios: np.ndarray,
    settings: tuple[float, float, float, float],
) -> tuple[np.ndarray, np.ndarray]:
    """Targets as the sum in equation 1 of IMPALA, and advantages as in rlax."""
    gamma, lam, rho_bar, c_bar = settings
    length = len(rewards)
    following = [*values[1:], 0.0]
    targets = np.array(values)
    for s in range(length):
        for t in range(s, length):
            delta = rewards[t] + gamma * following[t] - values[t]
            traces = [lam * min(c_bar, ratios[i]) for i in range(s, t)]
            targets[s] += gamma ** (t - s) * math.prod(traces) * min(rho_bar, ratios[t]) * delta
    following_targets = [*targets[1:], 0.0]
    advantages = []
    for s in range(length):
        bootstrap = lam * following_targets[s] + (1 - lam) * following[s]
        advantages.append(rewards[s] + gamma * bootstrap - values[s])
    return targets, np.array(advantages)


@given(
    st.lists(st.integers(1, 9), max_size=6),
    st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0.1, 3), st.floats(0.1, 3)),
    st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_vtrace_targets_are_the_sum_of_the_paper(
    lengths: list[int], bounds: tuple[float, float, float, float], seed: int
) -> None:
    random = np.random.default_rng(seed)
    rewards = [random.normal(size=length) for length in lengths]
    values = [random.normal(size=length) for length in lengths]
    ratios = [np.exp(random.normal(size=length)) for length in lengths]
    gamma, lam, rho_bar, c_bar = bounds
    vtrace = Gae(gamma, lam, whiten=False, truncation=Truncation(rho_bar, c_bar))
    estimates = vtrace.estimates(rewards, values, ratios)
    for estimate, *rows in zip(estimates, rewards, values, ratios, strict=True):
        targets, advantages = vtrace_by_definition(*rows, bounds)
        np.testing.assert_allclose(estimate.returns, targets, rtol=0, atol=1e-11)
        np.testing.assert_allclose(estimate.advantages, advantages, rtol=0, atol=1e-11)


def test_vtrace_on_policy_is_gae_bit_for_bit() -> None:
    random = np.random.default_rng(0)
    rewards, values = [list(random.normal(size=(3, 7))) for _ in range(2)]
    of_gae = Gae(0.97, 0.9, whiten=False).estimates(rewards, values)
    vtrace = Gae(0.97, 0.9, whiten=False, truncation=Truncation(1.0, 1.0))
    of_vtrace = vtrace.estimates(rewards, values, list(np.ones((3, 7))))
    for expected, estimate in zip(of_gae, of_vtrace, strict=True):
        np.testing.assert_array_equal(estimate.advantages, expected.advantages)
        np.testing.assert_array_equal(estimate.returns, expected.returns)


def test_limits_of_lambda() -> None:
    """lambda 1: the future rewards minus the value. lambda 0: only the next value counts."""
    rewards = np.array([0.0, 1.0, 2.0])
    values = np.array([0.5, -1.0, 3.0])
    [monte_carlo] = Gae(1.0, 1.0, False).estimates([rewards], [values])
    np.testing.assert_allclose(monte_carlo.advantages, [3.0 - 0.5, 3.0 + 1.0, 2.0 - 3.0])
    [one_step] = Gae(0.5, 0.0, False).estimates([rewards], [values])
    np.testing.assert_allclose(
        one_step.advantages, [0.5 * -1.0 - 0.5, 1 + 0.5 * 3.0 + 1.0, 2.0 - 3.0]
    )


@given(st.lists(st.integers(0, 9), min_size=2, max_size=6), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_moments_add_up_over_ranks(lengths: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    rows = [random.normal(3, 2, size=length) for length in [*lengths, 2]]
    all_values = np.concatenate(rows)
    parts = [Moments.of(rows[:2]), Moments.of(rows[2:])]
    moments = Moments([a + b for a, b in zip(*parts, strict=True)])
    np.testing.assert_allclose(
        [moments.mean, moments.variance], [all_values.mean(), all_values.var()], atol=1e-9
    )
    white = moments.whitened(all_values)
    np.testing.assert_allclose([white.mean(), white.std()], [0, 1], atol=1e-6)


def microbatch(seed: int = 0, tokens: int = 12) -> tuple[torch.Tensor, Any]:
    generator = torch.Generator().manual_seed(seed)
    old, returns, noise = torch.randn(3, tokens, dtype=torch.float64, generator=generator)
    mask = torch.rand(tokens, generator=generator) < 0.7
    values = (old + 0.3 * noise).requires_grad_()
    return values, SimpleNamespace(loss_mask=mask, old_values=old, returns=returns)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss_is_that_of_ppo(clip: float | None) -> None:
    values, batch = microbatch()
    out = value_loss(values, batch, clip)
    expected = 0.0
    clipped = 0
    for v, old, target, counts in zip(
        values.tolist(), batch.old_values.tolist(), batch.returns.tolist(), batch.loss_mask.tolist()
    ):
        near = min(max(v, old - clip), old + clip) if clip else v
        expected += counts * max((v - target) ** 2, (near - target) ** 2) / 2
        clipped += counts and (near - target) ** 2 > (v - target) ** 2
    assert out.loss.item() == pytest.approx(expected, abs=1e-12)
    assert out.sums["values_clipped"].item() == clipped and (clipped > 0) == (clip is not None)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_gradient_of_the_value_loss_by_finite_differences(clip: float | None) -> None:
    values, batch = microbatch(seed=3)
    value_loss(values, batch, clip).loss.backward()
    step = 1e-6
    for place in range(len(values)):
        moved = torch.zeros_like(values)
        moved[place] = step
        up = value_loss((values + moved).detach(), batch, clip).loss.item()
        down = value_loss((values - moved).detach(), batch, clip).loss.item()
        assert values.grad is not None
        assert values.grad[place].item() == pytest.approx((up - down) / (2 * step), abs=1e-6)


def test_unmoved_values_are_not_clipped() -> None:
    _, batch = microbatch()
    values = batch.old_values.clone().requires_grad_()
    value_loss(values, batch, 0.2).loss.backward()
    torch.testing.assert_close(
        values.grad, torch.where(batch.loss_mask, values.detach() - batch.returns, 0.0)
    )


def test_rounding_does_not_count_as_a_clipped_value() -> None:
    values, batch = microbatch(tokens=2000)
    near = SimpleNamespace(
        loss_mask=batch.loss_mask,
        old_values=batch.old_values.float(),
        returns=batch.returns.float(),
    )
    assert value_loss(values.detach().float(), near, clip=100.0).sums["values_clipped"] == 0


RULES = [name for name, recipe in ALGORITHMS.items() if "advantage" not in recipe.fixed]


@pytest.mark.parametrize("name", [*RULES, "ppo"])
def test_critic_goes_with_every_rule_of_tokens(name: str) -> None:
    config = AlgorithmConfig(name=name, advantage="critic", critic_targets="vtrace", rho_bar=2.0)
    assert not list(problems(config))
    algorithm = make_algorithm(config)
    assert algorithm.gae == Gae(1.0, 0.95, whiten=True, truncation=Truncation(2.0, 1.0))
    assert not algorithm.skip_zero
    assert has_critic(config) and not needs_groups_to_differ(config)
    assert needs_one_sequence(config) == "algorithm.advantage=critic"


def test_ppo_is_the_clipped_rule_with_a_critic() -> None:
    ppo = make_algorithm(AlgorithmConfig(name="ppo"))
    assert ppo.gae == Gae(1.0, 0.95, whiten=True)
    clipped = AlgorithmConfig(
        name="grpo", advantage="critic", loss_mean="token", dual_clip=math.inf
    )
    tokens = [3, 4]
    generator = torch.Generator().manual_seed(0)
    logprobs, mu, advantages = torch.randn(3, 7, generator=generator, dtype=torch.float64)
    mask = torch.ones(7, dtype=torch.bool)
    losses = []
    for config in (AlgorithmConfig(name="ppo"), clipped):
        out = packed_loss_of(tokens, logprobs, mu, advantages, mask, **asdict(config))
        losses.append(out.loss.item())
    assert losses[0] == losses[1]
