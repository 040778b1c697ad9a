"""The policy gradient on samples from older weights: AIPO (LlamaRL, section 6) and its relatives, which weight tokens by other rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.base import LossOutput, Microbatch
from megarl.algorithms.distill import Distillation
from megarl.algorithms.gae import Gae
from megarl.algorithms.groups import GroupLoss
from megarl.algorithms.kl import ESTIMATORS, k3
from megarl.algorithms.segments import segment_counts, segment_sums
from megarl.algorithms.weights import Rule, lag_weights

_MAX_REPORTED_LOG_RATIO = 20.0  # for metrics of ratios only: one absurd token must not make the mean infinite
_METRICS = {
    "is_ratio": "is_ratio/mean",
    "is_ratio_clipped": "is_ratio/clipped_fraction",
    "proximal_ratio": "proximal_ratio/mean",
    "behavior_ratio": "behavior_ratio/mean",
    "behavior_ratio_capped": "behavior_ratio/capped_fraction",
    "kl": "kl/mean",
}
_PAIR_METRICS = {"pair_margin": "pairs/margin", "pair_accuracy": "pairs/accuracy"}


@dataclass(frozen=True)
class PolicyGradient:
    """`weigh`, with bounds `rho_min` and `rho`, gives tokens their weights; `baseline` turns rewards into advantages.

    `loss_mean` "token": all tokens of a mini-batch count equally; "sequence": all responses do, whatever their length; "sequence_sum": a
    response's tokens are summed, and responses averaged, so that the policy's actions are whole responses.

    `kl_coef` times an estimate of the KL divergence from the reference (kl.py) is added to the loss, token by token, or (`kl` "reward")
    taken off the reward of the response, summed over its tokens (as in RLOO, arXiv:2402.14740).

    A batch of rollouts may make several optimizer steps. mu has sampled it, and prox, the proximal policy, is the policy before the first
    of them. `ratio` says which ratio r the rule bounds, and by what each token's weight is multiplied besides:

        behavior    r = pi/mu
        proximal    r = pi/prox            prox counts as what has sampled the tokens (PPO): the lag of prox behind mu is ignored
        decoupled   r = pi/prox            times prox/mu, or 0 where that is above `behavior_cap` (AReaL, arXiv:2505.24298) or
                    below `behavior_floor` (IcePop); `behavior_level` and `behavior_above` change this (weights.py)

    `entropy_coefficient` times the entropy of each token's distribution is taken off the loss, with the same mean.
    """

    weigh: Rule
    rho_min: float
    rho: float
    baseline: Callable[[Tensor], Tensor]
    loss_mean: str = "token"
    kl_coef: float = 0.0
    kl: str = "loss"
    kl_estimator: str = "k2"
    ratio: str = "behavior"
    behavior_floor: float = 0.0
    behavior_cap: float = math.inf
    behavior_level: str = "token"
    behavior_above: str = "drop"
    skip_zero_advantage: bool = True
    group_loss: GroupLoss | None = None
    gae: Gae | None = None
    distillation: Distillation | None = None  # adds a divergence from teachers (distill.py)
    entropy_coefficient: float = 0.0

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef != 0.0 or self.group_loss is not None

    @property
    def needs_proximal(self) -> bool:
        return self.ratio != "behavior"

    @property
    def skip_zero(self) -> bool:
        # A penalty, entropy and a teacher act at zero advantage too; a loss of pairs does not.
        penalty = self.kl_coef != 0.0 or self.entropy_coefficient != 0.0 or (self.group_loss is not None and not self.group_loss.pairs)
        return self.skip_zero_advantage and not penalty and self.gae is None and self.distillation is None

    def penalties(self, policy: Tensor, reference: Tensor) -> Tensor:
        return self.kl_coef * ESTIMATORS[self.kl_estimator](policy.double() - reference.double())

    @property
    def penalizes_rewards(self) -> bool:
        return self.kl_coef != 0.0 and self.kl == "reward"

    def penalty(self, policy: Tensor, reference: Tensor) -> float:
        return self.penalties(policy, reference).sum().item()

    def advantages(self, rewards: Tensor) -> Tensor:
        return self.baseline(rewards)

    def loss(self, logprobs: Tensor, microbatch: Microbatch) -> LossOutput:
        """Loss whose gradient is -sum_t w A grad log pi, with w of `weigh` and `ratio`, plus kl_coef times a KL penalty if `kl` is "loss".

        logprobs: [t], float32 or wider. Ratios are constants for autograd. A token that the trainer gives probability 0
        (log-prob -inf) adds nothing. NaN is not hidden: it reaches the loss.

        KL penalty, per token, with k2: c (log pi - log ref)^2 / 2 with c = min(r, rho), times what `ratio` multiplies weights by. Its
        gradient is c (log pi - log ref) grad log pi; with c = pi/mu and tokens from mu its expectation is exactly the gradient of
        KL(pi || ref) at each position. With k3 it is c (1 - ref/pi) grad log pi, that of KL(ref || pi).
        The metric `kl` sums c (ref/pi - 1 - log(ref/pi)), never negative and unbiased for the value.
        Departure from the paper: the penalty acts on each position by itself, not through the return of earlier tokens.
        Teachers change the advantages, or add their own terms (distill.py).

        The value is that of the objective as published: -w A log pi where w is a constant of it (AIPO, CISPO, REINFORCE), and
        -min(r A, clip(r) A) where that is differentiated through r, which has the same gradient.

        Sums: tokens, is_ratio (pi/mu), is_ratio_clipped (tokens whose weight is not r), and kl if there is a reference. With a proximal
        policy: proximal_ratio (pi/prox), behavior_ratio (prox/mu), and, if decoupled, behavior_ratio_capped (tokens outside floor and cap).
        Raises ValueError if kl_coef is not 0 and no reference is given.
        """
        mask, advantages, reference = microbatch.loss_mask, microbatch.advantages, microbatch.reference_logprobs
        if reference is None and self.kl_coef:
            raise ValueError(f"kl_coef is {self.kl_coef}, but there are no reference log-probs")
        possible = mask & (logprobs != -math.inf)
        log_pi = torch.where(possible, logprobs, 0.0)
        pi = torch.where(mask, logprobs.detach(), -math.inf)
        log_ratio = _log_ratio(pi, microbatch.mu_logprobs)
        sums = {"tokens": mask.sum(), "is_ratio": _reported(log_ratio)}
        factor = torch.ones_like(pi)
        if self.needs_proximal:
            given = microbatch.proximal_logprobs
            proximal = pi if given is None else torch.where(mask, given, -math.inf)
            log_ratio, lag = _log_ratio(pi, proximal), _log_ratio(proximal, microbatch.mu_logprobs)
            sums |= {"proximal_ratio": _reported(log_ratio), "behavior_ratio": _reported(lag)}
            if self.ratio == "decoupled":
                lag_weight = (self.behavior_floor, self.behavior_cap, self.behavior_level, self.behavior_above)
                factor, capped, _ = lag_weights(lag, mask, microbatch.boundaries, *lag_weight)
                sums["behavior_ratio_capped"] = (capped & mask).sum()
        correction = factor * log_ratio.clamp(max=math.log(self.rho)).exp()
        penalties: Tensor | float = 0.0
        if self.distillation is not None:
            more, penalties, told = self.distillation(log_pi.detach(), correction, possible, microbatch.teachers)
            advantages, sums = advantages + more, sums | told
        weight, clipped, surrogate = self.weigh(log_ratio, advantages, mask, microbatch.boundaries, self.rho_min, self.rho)
        sums["is_ratio_clipped"] = (clipped & mask).sum()
        advantages = torch.where(mask, advantages, 0.0)
        terms = -factor * weight * advantages * log_pi
        if surrogate is not None:
            terms = terms + (-factor * surrogate * advantages - terms).detach()  # its value, with the same gradient
        terms = penalties + terms
        if self.entropy_coefficient:
            terms = terms - self.entropy_coefficient * torch.where(mask, _entropy(microbatch), 0.0)
        if reference is not None:
            difference = log_pi - torch.where(possible, reference, 0.0)
            if self.kl_coef and self.kl == "loss":
                terms = terms + self.kl_coef * correction * ESTIMATORS[self.kl_estimator](difference)
            sums["kl"] = (correction * k3(difference.detach())).sum()
        return LossOutput(self._sum(terms, mask, microbatch.boundaries), sums)

    def denominator(self, tokens: int, samples: int) -> float:
        """The divisor of a mini-batch's losses: the policy's tokens or the samples, including those of zero advantage."""
        return float(tokens if self.loss_mean == "token" else samples)

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Means over tokens, or over pairs; NaN for a step on which nothing was trained, or that has no pair."""
        tokens = sums.get("tokens", 0.0) or math.nan
        always = {name: sums.get(name, 0.0) for name in ("is_ratio", "is_ratio_clipped")}
        found = {metric: value / tokens for name, value in (always | sums).items() if (metric := _METRICS.get(name))}
        if self.distillation is not None:
            found |= self.distillation.metrics(sums)
        if "pairs" in sums:
            found["pairs/fraction"] = sums["pairs"] / sums["prompts"]
            found |= {metric: sums[name] / (sums["pairs"] or math.nan) for name, metric in _PAIR_METRICS.items()}
        return found

    def _sum(self, terms: Tensor, mask: Tensor, boundaries: Tensor) -> Tensor:
        """The sum over all tokens, or over the sequences' means."""
        if self.loss_mean != "sequence":
            return terms.sum()
        return (segment_sums(terms, boundaries) / segment_counts(mask, boundaries, terms.dtype)).sum()


def _log_ratio(of: Tensor, to: Tensor) -> Tensor:
    """log(of / to), -inf where `of` is impossible (log-prob -inf), as it is outside the mask."""
    return torch.where(of == -math.inf, -math.inf, of - to)


def _entropy(microbatch: Microbatch) -> Tensor:
    if microbatch.entropy is None:
        raise ValueError("entropy_coefficient is not 0, but the microbatch has no entropy")
    return microbatch.entropy


def _reported(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(max=_MAX_REPORTED_LOG_RATIO).exp().sum()
