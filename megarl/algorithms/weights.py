"""How strongly each token counts that other weights than the present ones have sampled: what algorithms differ in.

Every rule gives the weight w of a token's term -w A log pi, a constant for autograd, from its log-ratio log(pi / mu). Where a paper states
an objective with a ratio inside, w A grad log pi is that objective's gradient: with one optimizer step a batch, that is all that matters.
Ratios are formed from bounded log-ratios, so none overflows. NaN passes through.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

DUAL_CLIP = 3.0  # a ratio no negative advantage is weighted beyond (Ye et al., arXiv:1912.09729; as verl)
_MOST = 20.0  # of a log-ratio in a sequence's mean or sum: one absurd token must not make infinity of it


class Weights(NamedTuple):
    weight: Tensor  # [b, s]
    clipped: Tensor  # [b, s] bool: where it is not the ratio


Rule = Callable[[Tensor, Tensor, Tensor, float, float], Weights]
"""(log_ratio [b, s], advantages [b, s], mask [b, s], rho_min, rho) -> Weights. Rows are sequences; garbage may stand outside the mask."""


def clamped(log_ratio: Tensor, advantages: Tensor, mask: Tensor, rho_min: float, rho: float) -> Weights:
    """min(pi/mu, rho): AIPO (LlamaRL, section 6). With `rho_min` above 0 clamped from below too: CISPO (MiniMax-M1, arXiv:2506.13585)."""
    low, high = _log(rho_min), _log(rho)
    return Weights(log_ratio.clamp(low, high).exp(), (log_ratio < low) | (log_ratio > high))


def clipped(log_ratio: Tensor, advantages: Tensor, mask: Tensor, rho_min: float, rho: float) -> Weights:
    """The gradient of min(r A, clip(r, rho_min, rho) A), r = pi/mu: none where a token is beyond the bound that its advantage pushes it
    towards (PPO; GRPO, arXiv:2402.03300). Negative advantages at ratios above DUAL_CLIP have none either."""
    most = _log(max(DUAL_CLIP, rho))
    beyond = torch.where(advantages > 0, log_ratio > _log(rho), (log_ratio < _log(rho_min)) | (log_ratio > most))
    return Weights(torch.where(beyond, 0.0, log_ratio.clamp(max=most).exp()), beyond)


def sequence_clipped(log_ratio: Tensor, advantages: Tensor, mask: Tensor, rho_min: float, rho: float) -> Weights:
    """As `clipped`, by the geometric mean of the response's ratios instead of each token's (GSPO, arXiv:2507.18071, equations 5 to 7).
    Its gradient is that of GSPO with loss_mean=sequence."""
    mean = _row_sums(log_ratio, mask) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return clipped(mean.expand_as(log_ratio), advantages, mask, rho_min, rho)


def masked(log_ratio: Tensor, advantages: Tensor, mask: Tensor, rho_min: float, rho: float) -> Weights:
    """pi/mu inside the bounds, 0 outside: tokens on which trainer and generator disagree too much teach nothing (IcePop, 2025)."""
    high = _log(rho)
    outside = (log_ratio < _log(rho_min)) | (log_ratio > high)
    return Weights(torch.where(outside, 0.0, log_ratio.clamp(max=high).exp()), outside)


def tapered(log_ratio: Tensor, advantages: Tensor, mask: Tensor, rho_min: float, rho: float) -> Weights:
    """1 for responses of positive advantage; for the others the ratio of the whole response, at most `rho` (TOPR, arXiv:2503.14286)."""
    whole, high = _row_sums(log_ratio, mask).expand_as(log_ratio), _log(rho)
    good = advantages > 0
    return Weights(torch.where(good, 1.0, whole.clamp(max=high).exp()), ~good & (whole > high))


def uncorrected(log_ratio: Tensor, advantages: Tensor, mask: Tensor, rho_min: float, rho: float) -> Weights:
    """1, as if the present weights had sampled all: what LlamaRL's figure 8 compares with."""
    return Weights(torch.ones_like(log_ratio), torch.zeros_like(mask))


def _row_sums(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """[b, 1] over the unmasked tokens of a row."""
    return torch.where(mask, log_ratio.clamp(-_MOST, _MOST), 0.0).sum(dim=1, keepdim=True)


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf
