"""The policy gradient on samples from older weights: AIPO (LlamaRL, section 6) and its relatives, which weight tokens by other rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.base import LossOutput, Microbatch
from megarl.algorithms.segments import segment_counts, segment_sums
from megarl.algorithms.weights import Rule

_MAX_REPORTED_LOG_RATIO = 20.0  # for the `is_ratio` metric only: one absurd token must not make the mean infinite


@dataclass(frozen=True)
class PolicyGradient:
    """`weigh`, with bounds `rho_min` and `rho`, gives tokens their weights; `baseline` turns rewards into advantages.

    `loss_mean` "token": all tokens of the batch count equally; "sequence": all responses do, whatever their length.
    """

    weigh: Rule
    rho_min: float
    rho: float
    baseline: Callable[[Tensor], Tensor]
    loss_mean: str = "token"
    kl_coef: float = 0.0
    skip_zero_advantage: bool = True

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef != 0.0

    @property
    def skip_zero(self) -> bool:
        return self.skip_zero_advantage and not self.needs_reference  # the penalty acts at zero advantage too

    def advantages(self, rewards: Tensor) -> Tensor:
        return self.baseline(rewards)

    def loss(self, logprobs: Tensor, microbatch: Microbatch) -> LossOutput:
        """Loss whose gradient is -sum_t w A grad log pi, w as `weigh` gives it, plus kl_coef times a KL penalty.

        logprobs: [t], float32 or wider. The log-ratio log pi - log mu is a constant for autograd. A token that the trainer
        gives probability 0 (log-prob -inf) adds nothing. NaN is not hidden: it reaches the loss.

        KL penalty, per token: c (log pi - log ref)^2 / 2 with c = min(pi/mu, rho), a constant for autograd too. Its gradient is
        c (log pi - log ref) grad log pi; with tokens from mu and nothing clipped its expectation is exactly the gradient of
        KL(pi || ref) at each position. (The usual "k3" estimate, differentiated, gives the gradient of KL(ref || pi)
        instead.) The metric `kl` sums c (ref/pi - 1 - log(ref/pi)), never negative and unbiased for the value.
        Departure from the paper: the penalty acts on each position by itself, not through the return of earlier tokens.

        Sums: tokens, is_ratio (pi/mu), is_ratio_clipped (tokens whose weight is not their ratio), and kl if there is a reference.
        Raises ValueError if kl_coef is not 0 and no reference is given.
        """
        mask, advantages, reference = microbatch.loss_mask, microbatch.advantages, microbatch.reference_logprobs
        if reference is None and self.needs_reference:
            raise ValueError(f"kl_coef is {self.kl_coef}, but there are no reference log-probs")
        possible = mask & (logprobs != -math.inf)
        log_pi = torch.where(possible, logprobs, 0.0)
        log_ratio = torch.where(possible, log_pi.detach() - microbatch.mu_logprobs, -math.inf)
        weight, clipped = self.weigh(log_ratio, advantages, mask, microbatch.boundaries, self.rho_min, self.rho)
        terms = -weight * torch.where(mask, advantages, 0.0) * log_pi
        sums = {
            "tokens": mask.sum(),
            "is_ratio": log_ratio.clamp(max=_MAX_REPORTED_LOG_RATIO).exp().sum(),
            "is_ratio_clipped": (clipped & mask).sum(),
        }
        if reference is not None:
            difference = log_pi - torch.where(possible, reference, 0.0)
            correction = log_ratio.clamp(max=math.log(self.rho)).exp()
            terms = terms + self.kl_coef * correction * difference.square() / 2
            sums["kl"] = _kl(difference.detach(), correction)
        return LossOutput(self._sum(terms, mask, microbatch.boundaries), sums)

    def denominator(self, tokens: int, samples: int) -> float:
        """The divisor of a batch's losses: the policy's tokens or the samples, including those of zero advantage."""
        return float(samples if self.loss_mean == "sequence" else tokens)

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Means over tokens; NaN for a step on which nothing was trained."""
        tokens = sums.get("tokens", 0.0) or math.nan
        means = {
            "is_ratio/mean": sums.get("is_ratio", 0.0) / tokens,
            "is_ratio/clipped_fraction": sums.get("is_ratio_clipped", 0.0) / tokens,
        }
        return means | ({"kl/mean": sums["kl"] / tokens} if "kl" in sums else {})

    def _sum(self, terms: Tensor, mask: Tensor, boundaries: Tensor) -> Tensor:
        """The sum over all tokens, or over the sequences' means."""
        if self.loss_mean == "token":
            return terms.sum()
        return (segment_sums(terms, boundaries) / segment_counts(mask, boundaries, terms.dtype)).sum()


def _kl(difference: Tensor, correction: Tensor) -> Tensor:
    return (correction * (torch.exp(-difference) - 1 + difference)).sum()
