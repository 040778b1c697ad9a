"""Algorithms related to AIPO against independent references, and properties of all algorithms."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from losses import F64, assert_same_gradient, gradient, loss_of, packed_loss_of

from megarl.algorithms.advantages import leave_one_out, normalized
from megarl.algorithms.recipes import problems
from megarl.algorithms.registry import find_rule, make_algorithm
from megarl.config.algorithms import ALGORITHMS, Recipe
from megarl.config.schema import AlgorithmConfig

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"


def random_batch(seed: int, spread: float = 0.5):
    """logits [b, s, v], tokens, mu_logprobs, advantages (one a row), mask.

    Some rows have no token, some only a few.
    """
    rng = np.random.default_rng(seed)
    b = 6
    s = 7
    v = 5
    logits = torch.tensor(rng.normal(size=(b, s, v)), requires_grad=True)
    tokens = torch.tensor(rng.integers(v, size=(b, s)))
    mask = torch.tensor(rng.random((b, s)) < 0.6)
    mask[0] = False
    mu = logprobs_of(logits, tokens).detach() + spread * torch.tensor(rng.normal(size=(b, s)))
    advantages = torch.tensor(rng.choice([-1.5, -0.5, 0.5, 1.5], size=(b, 1))).expand(b, s)
    return logits, tokens, mu, advantages, mask


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits, -1).gather(-1, tokens[..., None])[..., 0]


def rows_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (values * mask).sum(1) / mask.sum(1).clamp(min=1)


def ppo_objective(ratio, advantages, low: float, high: float, dual_clip: float = 3.0):
    """min(r A, clip(r) A), and at least dual_clip A if A is negative, as published.

    It is differentiated through the ratio.
    """
    least = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    return torch.where(advantages < 0, torch.maximum(least, dual_clip * advantages), least)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    spread=st.floats(0.01, 3.0),
    low=st.floats(0.0, 0.95),
    high=st.floats(1.05, 2.5),
)
def test_grpo_has_the_gradient_of_the_clipped_objective(
    seed: int, spread: float, low: float, high: float
):
    logits, tokens, mu, advantages, mask = random_batch(seed, spread)
    logprobs = logprobs_of(logits, tokens)
    objective = rows_mean(ppo_objective((logprobs - mu).exp(), advantages, low, high), mask).sum()
    out = loss_of(logprobs, mu, advantages, mask, name="grpo", rho_min=low, rho=high)
    # `loss` is the objective, as in TRL's and verl's reports
    torch.testing.assert_close(out.loss, -objective, rtol=1e-9, atol=1e-12)
    assert_same_gradient(out.loss, -objective, logits)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    spread=st.floats(0.01, 3.0),
    low=st.floats(0.0, 0.95),
    high=st.floats(1.05, 2.5),
)
def test_gspo_has_the_gradient_of_its_objective(seed: int, spread: float, low: float, high: float):
    """GSPO, equation 5: a response has one ratio, the geometric mean of its tokens' ratios.

    It has no dual clip.
    """
    logits, tokens, mu, advantages, mask = random_batch(seed, spread)
    logprobs = logprobs_of(logits, tokens)
    ratio = rows_mean(logprobs - mu, mask).exp()
    objective = ppo_objective(ratio, advantages[:, 0], low, high, math.inf)[mask.any(1)].sum()
    out = loss_of(logprobs, mu, advantages, mask, name="gspo", rho_min=low, rho=high)
    torch.testing.assert_close(out.loss, -objective, rtol=1e-9, atol=1e-12)
    assert_same_gradient(out.loss, -objective, logits)


@pytest.mark.parametrize("seed", range(3))
def test_topr_weighs_only_bad_responses_by_their_ratio(seed: int):
    logits, tokens, mu, advantages, mask = random_batch(seed)
    logprobs = logprobs_of(logits, tokens)
    expected = torch.zeros(())
    for row in range(len(tokens)):
        ratio = ((logprobs - mu)[row] * mask[row]).sum().exp().item()
        weight = 1.0 if advantages[row, 0] > 0 else min(ratio, 1.0)
        expected = expected - weight * advantages[row, 0] * (logprobs[row] * mask[row]).sum()
    out = loss_of(logprobs, mu, advantages, mask, name="topr")
    assert_same_gradient(out.loss, expected, logits)


def test_icepop_drops_ratios_outside_its_bounds():
    ratios = torch.tensor([[0.49, 0.51, 1.0, 4.9, 5.1]], dtype=F64)
    logprobs = torch.full((1, 5), -1.0, dtype=F64, requires_grad=True)
    out = loss_of(
        logprobs,
        -1.0 - ratios.log(),
        torch.ones(1, 5, dtype=F64),
        torch.ones(1, 5, dtype=torch.bool),
        name="icepop",
    )
    assert gradient(out.loss, logprobs)[0].tolist() == pytest.approx([0.0, -0.51, -1.0, -4.9, 0.0])
    assert out.sums["is_ratio_clipped"] == 2


def test_aipo_with_a_lower_bound_is_cispo():
    ratios = torch.tensor([[0.1, 0.9, 9.0]], dtype=F64)
    logprobs = torch.full((1, 3), -1.0, dtype=F64, requires_grad=True)
    advantages = torch.tensor([[1.0, -1.0, 1.0]], dtype=F64)
    mask = torch.ones(1, 3, dtype=torch.bool)
    out = loss_of(logprobs, -1.0 - ratios.log(), advantages, mask, rho_min=0.8, rho=1.3)
    assert gradient(out.loss, logprobs)[0].tolist() == pytest.approx([-0.8, 0.9, -1.3])
    assert out.sums["is_ratio_clipped"] == 2


def test_reinforce_ignores_staleness():
    logits, tokens, mu, advantages, mask = random_batch(0, 2.0)
    logprobs = logprobs_of(logits, tokens)
    out = loss_of(logprobs, mu, advantages, mask, name="reinforce")
    assert out.loss.item() == pytest.approx(-(advantages * logprobs * mask).sum().item())
    assert out.sums["is_ratio_clipped"] == 0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_on_policy_gradient_is_the_plain_one(name: str):
    logits, tokens, _, advantages, mask = random_batch(1)
    logprobs = logprobs_of(logits, tokens)
    out = loss_of(logprobs, logprobs.detach(), advantages, mask, name=name, loss_mean="token")
    assert torch.allclose(gradient(out.loss, logprobs), -advantages * mask, rtol=1e-12)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_algorithm_overflows_or_reads_masked_garbage(name: str):
    inf = math.inf
    nan = math.nan
    logprobs = torch.tensor(
        [[-1.0, -1.0, -inf, -inf, -700.0, 0.0, nan], [-1.0] * 7], requires_grad=True
    )
    mu = torch.tensor([[-1e30, -inf, -1.0, -inf, 0.0, -800.0, inf], [-1.0] * 7])
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0, 6] = False
    for advantage in (1.0, -1.0):
        advantages = torch.full((2, 7), advantage)
        advantages[0, 6] = nan
        out = loss_of(logprobs, mu, advantages, mask, name=name)
        assert torch.isfinite(out.loss) and torch.isfinite(gradient(out.loss, logprobs)).all()


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("place", ["logprobs", "advantages"])
def test_no_algorithm_hides_nan(name: str, place: str):
    tensors = {
        "logprobs": torch.tensor([[-1.0, -1.0]]),
        "mu": torch.tensor([[-1.0, -1.0]]),
        "advantages": torch.tensor([[1.0, 1.0]]),
    }
    tensors[place] = torch.tensor([[math.nan, math.nan]])
    assert torch.isnan(loss_of(**tensors, mask=torch.ones(1, 2, dtype=torch.bool), name=name).loss)


def test_mean_over_sequences_weighs_all_lengths_alike():
    """The gradient of the batch: the sum of the rows' token means, divided by all samples,
    including those left out.
    """
    mask = torch.tensor([[True, True, True, True], [True, False, False, False]])
    logprobs = torch.full((2, 4), -1.0, dtype=F64, requires_grad=True)
    out = loss_of(
        logprobs, logprobs.detach(), torch.ones(2, 4, dtype=F64), mask, loss_mean="sequence"
    )
    assert gradient(out.loss, logprobs).tolist() == [[-0.25] * 4, [-1.0, 0.0, 0.0, 0.0]]
    assert (
        make_algorithm(AlgorithmConfig(loss_mean="sequence")).denominator(tokens=5, samples=3)
        == 3.0
    )
    assert make_algorithm(AlgorithmConfig()).denominator(tokens=5, samples=3) == 5.0


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    seed=st.integers(0, 2**31),
    name=st.sampled_from(sorted(ALGORITHMS)),
)
@pytest.mark.parametrize("loss_mean", ["token", "sequence", "sequence_sum"])
def test_packed_sequences_equal_single_ones(
    lengths: list[int], seed: int, name: str, loss_mean: str
):
    """Loss, gradient and sums, for any lengths."""
    rng = np.random.default_rng(seed)
    t = sum(lengths)
    logprobs = torch.tensor(-rng.exponential(size=t), requires_grad=True)
    mu = torch.tensor(-rng.exponential(size=t))
    reference = torch.tensor(-rng.random(t))
    advantages = torch.tensor(np.repeat(rng.choice([-1.0, 0.5], size=len(lengths)), lengths))
    mask = torch.tensor(rng.random(t) < 0.7)
    options = {"name": name, "loss_mean": loss_mean, "kl_coef": 0.1}
    packed = packed_loss_of(lengths, logprobs, mu, advantages, mask, reference, **options)
    singles = []
    start = 0
    for length in lengths:
        tokens = slice(start, start + length)
        start += length
        singles.append(
            packed_loss_of(
                [length],
                logprobs[tokens],
                mu[tokens],
                advantages[tokens],
                mask[tokens],
                reference[tokens],
                **options,
            )
        )
    one_by_one = torch.stack([out.loss for out in singles]).sum()
    torch.testing.assert_close(packed.loss, one_by_one, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        gradient(packed.loss, logprobs), gradient(one_by_one, logprobs), rtol=1e-12, atol=1e-12
    )
    for key, value in packed.sums.items():
        torch.testing.assert_close(
            value, torch.stack([out.sums[key] for out in singles]).sum(), rtol=1e-12, atol=1e-12
        )


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=4, max_size=4), min_size=1, max_size=5
    )
)
def test_leave_one_out_and_normalized_against_numpy(rewards: list[list[float]]):
    r = np.array(rewards)
    baseline = (r.sum(1, keepdims=True) - r) / 3
    np.testing.assert_allclose(leave_one_out(torch.tensor(r)).numpy(), r - baseline, atol=1e-12)
    expected = (r - r.mean(1, keepdims=True)) / (r.std(1, ddof=1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(normalized(torch.tensor(r)).numpy(), expected, atol=1e-9)


def test_every_recipe_has_a_rule_and_bounds_that_fit():
    for name in ALGORITHMS:
        assert callable(find_rule(name))
        assert list(problems(AlgorithmConfig(name=name))) == []


@pytest.mark.parametrize("name", ALGORITHMS)
def test_page_lists_bounds_and_defaults_of_each_algorithm(name: str):
    (row,) = (line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{name}` |"))
    recipe = ALGORITHMS[name]
    bounds = [f"{bound:g}" if bound is not None else "–" for bound in (recipe.rho_min, recipe.rho)]
    ratios = "any" if recipe.ratios == Recipe.ratios else ", ".join(recipe.ratios)
    expected = [", ".join(bounds).replace("–, –", "–"), recipe.advantage, recipe.loss_mean, ratios]
    assert [cell.strip() for cell in row.split("|")[3:7]] == expected
