"""A critic's advantages, compared with their definition, and its loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.registry import make_algorithm
from megarl.config.schema import AlgorithmConfig
from megarl.critic.executor import value_loss
from megarl.critic.losses import Gae, Moments


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
    advantages = Gae(gamma, lam, whiten=False).advantages(rewards, values)
    assert [len(row) for row in advantages] == lengths
    for row, reward, value in zip(advantages, rewards, values, strict=True):
        np.testing.assert_allclose(
            row, by_definition(reward, value, gamma, lam), rtol=0, atol=1e-12
        )


def test_limits_of_lambda() -> None:
    """lambda 1: the future rewards minus the value. lambda 0: only the next value counts."""
    rewards = np.array([0.0, 1.0, 2.0])
    values = np.array([0.5, -1.0, 3.0])
    [monte_carlo] = Gae(1.0, 1.0, False).advantages([rewards], [values])
    np.testing.assert_allclose(monte_carlo, [3.0 - 0.5, 3.0 + 1.0, 2.0 - 3.0])
    [one_step] = Gae(0.5, 0.0, False).advantages([rewards], [values])
    np.testing.assert_allclose(one_step, [0.5 * -1.0 - 0.5, 1 + 0.5 * 3.0 + 1.0, 2.0 - 3.0])


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


def test_ppo_has_gae_and_keeps_zero_advantages() -> None:
    algorithm = make_algorithm(AlgorithmConfig(name="ppo"))
    assert algorithm.gae == Gae(1.0, 0.95, whiten=True)
    assert not algorithm.skip_zero
