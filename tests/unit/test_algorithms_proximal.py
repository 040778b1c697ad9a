"""Several optimizer steps on a batch: losses against autograd of the published objectives in
float64, and refused settings.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from losses import F64, assert_same_gradient, gradient, loss_of
from test_algorithms_relatives import logprobs_of, ppo_objective, random_batch, rows_mean

from megarl.algorithms.recipes import problems
from megarl.algorithms.registry import make_algorithm
from megarl.config.algorithms import ALGORITHMS
from megarl.config.schema import AlgorithmConfig

CAP = 1.5
ALLOWED = [(name, ratio) for name, recipe in ALGORITHMS.items() for ratio in recipe.ratios]


def proximal_batch(seed: int, spread: float):
    """Like `random_batch`, with a proximal policy that is as far from mu as from pi."""
    logits, tokens, prox, advantages, mask = random_batch(seed, spread)
    noise = torch.randn(prox.shape, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return logits, tokens, prox, prox - spread * noise, advantages, mask


def lag_weight(prox: torch.Tensor, mu: torch.Tensor, cap: float) -> torch.Tensor:
    ratio = (prox - mu).exp()
    return ratio * (ratio <= cap)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    spread=st.floats(0.01, 2.0),
    ratio=st.sampled_from(["proximal", "decoupled"]),
)
def test_grpo_has_the_gradient_of_ppo_and_of_areal(seed: int, spread: float, ratio: str):
    """AReaL's objective is prox/mu min(r A, clip(r) A) with r = pi/prox, differentiated only
    through r. PPO's has no prox/mu.
    """
    logits, tokens, prox, mu, advantages, mask = proximal_batch(seed, spread)
    logprobs = logprobs_of(logits, tokens)
    factor = lag_weight(prox, mu, CAP) if ratio == "decoupled" else torch.ones_like(mu)
    objective = rows_mean(
        factor * ppo_objective((logprobs - prox).exp(), advantages, 0.8, 1.2), mask
    ).sum()
    cap = {"behavior_cap": CAP} if ratio == "decoupled" else {}
    out = loss_of(logprobs, mu, advantages, mask, proximal=prox, name="grpo", ratio=ratio, **cap)
    torch.testing.assert_close(out.loss, -objective, rtol=1e-9, atol=1e-12)
    assert_same_gradient(out.loss, -objective, logits)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), spread=st.floats(0.01, 2.0))
def test_gspo_clips_responses_and_weighs_tokens_by_lag(seed: int, spread: float):
    logits, tokens, prox, mu, advantages, mask = proximal_batch(seed, spread)
    logprobs = logprobs_of(logits, tokens)
    ratio = rows_mean(logprobs - prox, mask).exp().detach()
    clipped = ((advantages[:, 0] > 0) & (ratio > 1.2)) | ((advantages[:, 0] < 0) & (ratio < 0.8))
    weight = (ratio * ~clipped)[:, None] * lag_weight(prox, mu, CAP)
    objective = rows_mean(weight * advantages * logprobs, mask).sum()
    options = {
        "name": "gspo",
        "rho_min": 0.8,
        "rho": 1.2,
        "ratio": "decoupled",
        "behavior_cap": CAP,
    }
    out = loss_of(logprobs, mu, advantages, mask, proximal=prox, **options)
    assert_same_gradient(out.loss, -objective, logits)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), spread=st.floats(0.01, 1.0))
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("above", ["drop", "truncate"])
def test_lag_weights_of_tokens_and_responses(above: str, level: str, seed: int, spread: float):
    """A weight above the cap is dropped or truncated."""
    logits, tokens, prox, mu, advantages, mask = proximal_batch(seed, spread)
    logprobs = logprobs_of(logits, tokens)
    lag = (prox - mu).exp()
    if level == "sequence":
        lag = ((prox - mu) * mask).sum(1, keepdim=True).expand_as(mu).exp()
    factor = lag.clamp(max=CAP) if above == "truncate" else lag * (lag <= CAP)
    objective = rows_mean(
        factor * ppo_objective((logprobs - prox).exp(), advantages, 0.8, 1.2), mask
    ).sum()
    options = {
        "ratio": "decoupled",
        "behavior_cap": CAP,
        "behavior_level": level,
        "behavior_above": above,
    }
    out = loss_of(logprobs, mu, advantages, mask, proximal=prox, name="grpo", **options)
    assert_same_gradient(out.loss, -objective, logits)
    assert out.sums["behavior_ratio_capped"] == ((lag > CAP) & mask).sum()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), spread=st.floats(0.01, 1.5))
@pytest.mark.parametrize("above", ["drop", "truncate"])
def test_icepop_drops_lags_on_either_side(above: str, seed: int, spread: float):
    """M(prox/mu; 0.5, 5) min(r A, clip(r) A) with r = pi/prox, where M(k) is k inside the bounds
    and 0 outside.
    """
    logits, tokens, prox, mu, advantages, mask = proximal_batch(seed, spread)
    logprobs = logprobs_of(logits, tokens)
    lag = (prox - mu).exp()
    factor = lag.clamp(0.5, 5.0) if above == "truncate" else lag * ((lag >= 0.5) & (lag <= 5.0))
    objective = rows_mean(
        factor * ppo_objective((logprobs - prox).exp(), advantages, 0.8, 1.2, math.inf), mask
    ).sum()
    options = {
        "ratio": "decoupled",
        "behavior_floor": 0.5,
        "behavior_above": above,
        "dual_clip": 1e9,
    }
    out = loss_of(logprobs, mu, advantages, mask, proximal=prox, name="grpo", **options)
    torch.testing.assert_close(out.loss, -objective, rtol=1e-9, atol=1e-12)
    assert_same_gradient(out.loss, -objective, logits)
    assert out.sums["behavior_ratio_capped"] == (((lag > 5.0) | (lag < 0.5)) & mask).sum()


def test_aipo_decoupled_by_hand():
    """pi/prox: 2, 8, 0.5, 1; the bound reduces the second to 4. prox/mu: 2, 1, 3, 6; the last is
    above the cap.
    """
    pi = torch.log(torch.tensor([[0.5, 0.8, 0.1, 0.6]], dtype=F64)).requires_grad_()
    prox = torch.log(torch.tensor([[0.25, 0.1, 0.2, 0.6]], dtype=F64))
    mu = prox - torch.log(torch.tensor([[2.0, 1.0, 3.0, 6.0]], dtype=F64))
    advantages = torch.tensor([[1.0, 1.0, -2.0, 1.0]], dtype=F64)
    out = loss_of(
        pi, mu, advantages, torch.ones(1, 4, dtype=torch.bool), proximal=prox, ratio="decoupled"
    )
    assert gradient(out.loss, pi)[0].tolist() == pytest.approx([-4.0, -4.0, 3.0, 0.0])
    sums = {name: value.item() for name, value in out.sums.items()}
    metrics = make_algorithm(AlgorithmConfig(ratio="decoupled")).metrics(sums)
    assert metrics == pytest.approx(
        {
            "is_ratio/mean": (4 + 8 + 1.5 + 6) / 4,
            "is_ratio/clipped_fraction": 1 / 4,
            "proximal_ratio/mean": 11.5 / 4,
            "behavior_ratio/mean": 12 / 4,
            "behavior_ratio/capped_fraction": 1 / 4,
        }
    )


@pytest.mark.parametrize(("name", "ratio"), ALLOWED)
def test_proximal_policy_is_at_first_the_policy(name: str, ratio: str):
    """Bit for bit. So it is not scored if a batch makes one optimizer step."""
    logits, tokens, mu, advantages, mask = random_batch(3)
    logprobs = logprobs_of(logits, tokens)
    reference = logprobs.detach() - 0.1
    options = {"name": name, "ratio": ratio, "kl_coef": 0.1}
    scored = loss_of(logprobs, mu, advantages, mask, reference, logprobs.detach(), **options)
    unscored = loss_of(logprobs, mu, advantages, mask, reference, None, **options)
    assert torch.equal(scored.loss, unscored.loss) and scored.sums == unscored.sums
    assert torch.equal(gradient(scored.loss, logits), gradient(unscored.loss, logits))


@pytest.mark.parametrize(("name", "ratio"), ALLOWED)
def test_ratios_are_equal_where_nothing_is_stale(name: str, ratio: str):
    logits, tokens, mu, advantages, mask = random_batch(4)
    logprobs = logprobs_of(logits, tokens)
    options = {"name": name, "kl_coef": 0.1}
    plain = loss_of(logprobs, mu, advantages, mask, mu - 0.1, mu, ratio="behavior", **options)
    chosen_ratio = loss_of(logprobs, mu, advantages, mask, mu - 0.1, mu, ratio=ratio, **options)
    assert torch.equal(gradient(plain.loss, logits), gradient(chosen_ratio.loss, logits))


@pytest.mark.parametrize("ratio", ["behavior", "proximal", "decoupled"])
def test_penalty_is_corrected_by_the_ratio(ratio: str):
    """The penalty is c (log pi - log ref)^2 / 2 with c = min(r, rho), times prox/mu if decoupled.

    Advantages are 0.
    """
    logits, tokens, prox, mu, _, mask = proximal_batch(5, 0.7)
    logprobs = logprobs_of(logits, tokens)
    reference = prox - 0.3
    r = (logprobs.detach() - (mu if ratio == "behavior" else prox)).exp().clamp(max=1.2)
    factor = lag_weight(prox, mu, 5.0) if ratio == "decoupled" else torch.ones_like(mu)
    objective = (factor * r * (logprobs - reference).square() / 2 * mask).sum()
    out = loss_of(
        logprobs, mu, torch.zeros_like(mu), mask, reference, prox, ratio=ratio, rho=1.2, kl_coef=1.0
    )
    assert_same_gradient(out.loss, objective, logits)


@pytest.mark.parametrize(("name", "ratio"), ALLOWED)
def test_absurd_proximal_log_probs_do_not_hide_nan(name: str, ratio: str):
    inf = math.inf
    nan = math.nan
    mask = torch.tensor([[True] * 6 + [False]])
    logprobs = torch.tensor([[-1.0, -inf, -1.0, -1.0, -inf, -1.0, nan]], requires_grad=True)
    prox = torch.tensor([[-inf, -inf, -inf, -800.0, -1.0, 0.0, nan]])
    mu = torch.tensor([[-1.0, -1.0, -inf, -1e30, -inf, -900.0, nan]])
    for advantage in (1.0, -1.0):
        advantages = torch.tensor([[advantage] * 6 + [nan]])
        out = loss_of(logprobs, mu, advantages, mask, proximal=prox, name=name, ratio=ratio)
        assert torch.isfinite(out.loss) and torch.isfinite(gradient(out.loss, logprobs)).all()
        assert all(torch.isfinite(value) for value in out.sums.values())
    if ratio != "behavior" and name != "topr":  # topr uses no ratio at a positive advantage
        one = torch.tensor([[-1.0]])
        true = torch.tensor([[True]])
        proximal = torch.tensor([[nan]])
        out = loss_of(one, one, -one, true, proximal=proximal, name=name, ratio=ratio)
        assert torch.isnan(out.loss)


@pytest.mark.parametrize(("name", "ratio"), ALLOWED)
def test_allowed_ratios_have_no_problems(name: str, ratio: str):
    assert list(problems(AlgorithmConfig(name=name, ratio=ratio))) == []
