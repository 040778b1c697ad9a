"""AIPO: importance-weighted policy gradient with a one-sided clip (LlamaRL, section 6)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

from megarl.algorithms.base import LossOutput, Microbatch, group_advantages

_MAX_REPORTED_LOG_RATIO = 20.0  # only for the `is_ratio` metric: one absurd token must not turn the mean into infinity


def aipo_loss(
    logprobs: Tensor,
    mu_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    rho: float,
    kl_coef: float = 0.0,
    reference_logprobs: Optional[Tensor] = None,
) -> LossOutput:
    """Loss whose gradient is -sum_t min(pi/mu, rho) A grad log pi, LlamaRL section 6, plus kl_coef times a KL penalty.

    All tensors are [b, s], log-probs in float32 or wider. The ratio is a constant for autograd. It is formed as
    exp(min(log pi - log mu, log rho)), so no finite or infinite log-ratio overflows; a token that the trainer gives
    probability 0 (log-prob -inf) has weight 0 and adds nothing. NaN is not hidden: it reaches the loss.

    KL penalty, per token: w (log pi - log ref)^2 / 2, w the same clipped ratio, also a constant for autograd. Its
    gradient is w (log pi - log ref) grad log pi; with tokens from mu and nothing clipped its expectation is exactly the
    gradient of KL(pi || ref) at each position. (The usual "k3" estimate, differentiated, gives the gradient of
    KL(ref || pi) instead.) The metric `kl` sums w (ref/pi - 1 - log(ref/pi)), never negative and unbiased for the value.
    Departure from the paper: the penalty acts on each position by itself, not through the return of earlier tokens.

    Sums: tokens, is_ratio (before the clip), is_ratio_clipped (tokens with pi/mu > rho), and kl if there is a reference.
    Raises: ValueError if kl_coef is not 0 and no reference is given.
    """
    possible = mask & (logprobs != -math.inf)
    log_pi = torch.where(possible, logprobs, 0.0)
    log_ratio = torch.where(possible, log_pi.detach() - mu_logprobs, -math.inf)
    weight = log_ratio.clamp(max=math.log(rho)).exp()
    loss = -(weight * torch.where(mask, advantages, 0.0) * log_pi).sum()
    sums = {
        "tokens": mask.sum(),
        "is_ratio": log_ratio.clamp(max=_MAX_REPORTED_LOG_RATIO).exp().sum(),
        "is_ratio_clipped": (log_ratio > math.log(rho)).sum(),
    }
    if reference_logprobs is not None:
        log_reference = torch.where(possible, reference_logprobs, 0.0)
        difference = log_pi - log_reference
        loss = loss + kl_coef * (weight * difference.square() / 2).sum()
        detached = difference.detach()
        sums["kl"] = (weight * (torch.exp(-detached) - 1 + detached)).sum()
    elif kl_coef != 0.0:
        raise ValueError(f"kl_coef is {kl_coef}, but there are no reference log-probs")
    return LossOutput(loss, sums)


@dataclass(frozen=True)
class Aipo:
    rho: float
    kl_coef: float = 0.0
    skip_zero_advantage: bool = True

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef != 0.0

    @property
    def skip_zero(self) -> bool:
        return self.skip_zero_advantage and not self.needs_reference  # the penalty acts at zero advantage too

    def advantages(self, rewards: Tensor) -> Tensor:
        return group_advantages(rewards)

    def loss(self, logprobs: Tensor, microbatch: Microbatch) -> LossOutput:
        m = microbatch
        return aipo_loss(logprobs, m.mu_logprobs, m.advantages, m.loss_mask, self.rho, self.kl_coef, m.reference_logprobs)

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Token means of a step's sums; NaN for a step on which nothing was trained."""
        tokens = sums.get("tokens", 0.0) or math.nan
        means = {
            "is_ratio/mean": sums.get("is_ratio", 0.0) / tokens,
            "is_ratio/clipped_fraction": sums.get("is_ratio_clipped", 0.0) / tokens,
        }
        return means | ({"kl/mean": sums["kl"] / tokens} if "kl" in sums else {})
