"""How much a token counts that other weights than the current ones have sampled: this is what algorithms differ in.

From a token's log-ratio log(pi / mu) a rule computes the weight w of its term -w A log pi; w is a constant for autograd. Where a paper
states an objective that contains the ratio, w A grad log pi is its gradient at the current weights, and so at every optimizer step. With
algorithm.ratio other than behavior, the log-ratio is that to the proximal policy (policy_gradient.py).
Ratios are formed from bounded log-ratios, so none overflows. NaN passes through.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.segments import segment_counts, segment_sums, spread

_MOST = 20.0  # bound of a log-ratio in means, sums and weights without another bound, which one absurd token must not make infinite


class Weights(NamedTuple):
    weight: Tensor  # [t]
    clipped: Tensor  # [t] bool: where the weight is not the ratio
    surrogate: Tensor | None = (
        None  # [t] what times A is the objective whose gradient w A grad log pi is; None: the objective is w A log pi
    )


Rule = Callable[[Tensor, Tensor, Tensor, Tensor, float, float], Weights]
"""(log_ratio [t], advantages [t], mask [t], boundaries [n + 1], rho_min, rho) -> Weights.

The tokens of n sequences stand end to end; `boundaries` says where each sequence begins and ends (segments.py). Outside the mask anything
goes.
"""


def clamped(log_ratio: Tensor, advantages: Tensor, mask: Tensor, boundaries: Tensor, rho_min: float, rho: float) -> Weights:
    """min(pi/mu, rho): AIPO (LlamaRL, section 6). `rho_min` above 0 clamps from below too: CISPO (MiniMax-M1, arXiv:2506.13585)."""
    low, high = _log(rho_min), _log(rho)
    return Weights(log_ratio.clamp(low, high).exp(), (log_ratio < low) | (log_ratio > high))


def clipped(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, boundaries: Tensor, rho_min: float, rho: float, dual_clip: float
) -> Weights:
    """The gradient of min(r A, clip(r, rho_min, rho) A), r = pi/mu (PPO; GRPO, arXiv:2402.03300).

    It is 0 for tokens beyond the bound that their advantage pushes them towards, and for negative advantages at ratios above `dual_clip`
    (Ye et al., arXiv:1912.09729) and `rho`.
    """
    low, high, most = _log(rho_min), _log(rho), _log(max(dual_clip, rho))
    beyond = torch.where(advantages > 0, log_ratio > high, (log_ratio < low) | (log_ratio > most))
    surrogate = torch.where(advantages > 0, log_ratio.clamp(max=high), log_ratio.clamp(low, min(most, _MOST))).exp()
    return Weights(torch.where(beyond, 0.0, log_ratio.clamp(max=min(most, _MOST)).exp()), beyond, surrogate)


def sequence_clipped(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, boundaries: Tensor, rho_min: float, rho: float, dual_clip: float
) -> Weights:
    """Like `clipped`, but by the geometric mean of a response's ratios (GSPO, arXiv:2507.18071, equations 5 to 7).

    With loss_mean=sequence the gradient is GSPO's.
    """
    mean = _sequence_sums(log_ratio, mask, boundaries) / segment_counts(mask, boundaries, log_ratio.dtype)
    return clipped(spread(mean, boundaries, len(mask)), advantages, mask, boundaries, rho_min, rho, dual_clip)


def response_clipped(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, boundaries: Tensor, rho_min: float, rho: float, dual_clip: float
) -> Weights:
    """Like `clipped`, but by the ratio of the whole response, the product of its tokens' (Proximal RLOO, arXiv:2410.18252, appendix B).

    With loss_mean=sequence_sum the gradient is Proximal RLOO's.
    """
    whole = spread(_sequence_sums(log_ratio, mask, boundaries), boundaries, len(mask))
    weight, beyond, surrogate = clipped(whole, advantages, mask, boundaries, rho_min, rho, dual_clip)
    assert surrogate is not None
    tokens = spread(segment_counts(mask, boundaries, log_ratio.dtype), boundaries, len(mask))
    return Weights(weight, beyond, surrogate / tokens)  # once a response


def masked(log_ratio: Tensor, advantages: Tensor, mask: Tensor, boundaries: Tensor, rho_min: float, rho: float) -> Weights:
    """pi/mu inside the bounds, 0 outside: tokens on which trainer and generator disagree too much do not count (IcePop, 2025)."""
    high = _log(rho)
    outside = (log_ratio < _log(rho_min)) | (log_ratio > high)
    return Weights(torch.where(outside, 0.0, log_ratio.clamp(max=high).exp()), outside)


def tapered(log_ratio: Tensor, advantages: Tensor, mask: Tensor, boundaries: Tensor, rho_min: float, rho: float) -> Weights:
    """1 for responses of positive advantage; for the others the ratio of the whole response, at most `rho` (TOPR, arXiv:2503.14286)."""
    whole, high = spread(_sequence_sums(log_ratio, mask, boundaries), boundaries, len(mask)), _log(rho)
    good = advantages > 0
    return Weights(torch.where(good, 1.0, whole.clamp(max=high).exp()), ~good & (whole > high))


def uncorrected(log_ratio: Tensor, advantages: Tensor, mask: Tensor, boundaries: Tensor, rho_min: float, rho: float) -> Weights:
    """1, as if the current weights had sampled everything: LlamaRL's figure 8 compares with this."""
    return Weights(torch.ones_like(log_ratio), torch.zeros_like(mask))


def lag_weights(log_lag: Tensor, mask: Tensor, boundaries: Tensor, floor: float, cap: float, level: str, above: str) -> Weights:
    """What tokens are weighted by besides, from log(prox/mu) [t]: their own prox/mu, or with `level` "sequence" the product of the
    response's. Above `cap` and below `floor`, 0 (IcePop), or with `above` "truncate" that bound (truncated importance sampling)."""
    if level == "sequence":
        log_lag = spread(_sequence_sums(log_lag, mask, boundaries), boundaries, len(mask))
    low, high = _log(floor), _log(cap)
    beyond = (log_lag < low) | (log_lag > high)
    weight = log_lag.clamp(low, min(high, _MOST)).exp()
    return Weights(weight if above == "truncate" else torch.where(beyond, 0.0, weight), beyond)


def _sequence_sums(log_ratio: Tensor, mask: Tensor, boundaries: Tensor) -> Tensor:
    """[n] sums over the unmasked tokens of each sequence."""
    return segment_sums(torch.where(mask, log_ratio.clamp(-_MOST, _MOST), 0.0), boundaries)


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf
