"""The losses on single tokens: AIPO (LlamaRL, section 6) and its relatives, their estimates of KL, and supervised learning."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.advantages import GroupLoss
from megarl.algorithms.base import LossOutput, Microbatch
from megarl.critic.losses import Gae
from megarl.teachers.loss import Distillation

# Sums over sequences that are laid end to end.
#
# `boundaries` [n + 1] int32 are where n sequences begin and end in a row of t tokens: sequence i has tokens boundaries[i] to
# boundaries[i + 1] - 1.


def segment_sums(values: Tensor, boundaries: Tensor) -> Tensor:
    """[n] of floats [t]; differentiable. The same bits at every call, also on GPUs: ranks that hold copies of a weight rely on it."""
    return torch.segment_reduce(values, "sum", offsets=boundaries)


def segment_counts(mask: Tensor, boundaries: Tensor, dtype: torch.dtype) -> Tensor:
    """[n]: how many of `mask` [t] are set in each sequence, but at least 1."""
    return segment_sums(mask.to(dtype), boundaries).clamp(min=1)


def spread(values: Tensor, boundaries: Tensor, tokens: int) -> Tensor:
    """[tokens], each the value [n] of its sequence; a constant for autograd."""
    return values.detach().repeat_interleave(boundaries.diff(), output_size=tokens)


# Estimates of KL(pi || ref) from tokens that pi has sampled (Schulman, "Approximating KL divergence", 2020).
#
# Of d = log pi - log ref each is a term whose mean over tokens of pi estimates the divergence: k1 and k3 without bias, k2 and k3 never
# negative. In a loss, only the gradient counts. In the mean, k2's, d grad log pi, is the gradient of KL(pi || ref), and k3's is that of
# KL(ref || pi). k1's, grad log pi, is 0 in the mean, so k1 is for rewards alone.


_MOST_DIFFERENCE = 20.0  # bound of -d in k3, whose exponential one absurd token must not make infinite


def k1(difference: Tensor) -> Tensor:
    return difference


def k2(difference: Tensor) -> Tensor:
    return difference.square() / 2


def k3(difference: Tensor) -> Tensor:
    return (-difference).clamp(max=_MOST_DIFFERENCE).exp() - 1 + difference


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


# How much a token counts that older weights have sampled. Algorithms differ in this rule.
#
# From a token's log-ratio log(pi / mu) a rule computes the weight w of its term -w A log pi; w is a constant for autograd. Where a paper
# states an objective that contains the ratio, w A grad log pi is its gradient at the current weights, and so at every optimizer step. With
# algorithm.ratio other than behavior, the log-ratio is that to the proximal policy.
# Ratios are formed from bounded log-ratios, so none overflows. NaN passes through.


_MOST = 20.0  # bound of a log-ratio in means, sums and weights without another bound, which one absurd token must not make infinite


class Weights(NamedTuple):
    weight: Tensor  # [t]
    clipped: Tensor  # [t] bool: where the weight is not the ratio
    surrogate: Tensor | None = (
        None  # [t] what times A is the objective whose gradient w A grad log pi is; None: the objective is w A log pi
    )


Rule = Callable[[Tensor, Tensor, Tensor, Tensor, float, float], Weights]
"""(log_ratio [t], advantages [t], mask [t], boundaries [n + 1], rho_min, rho) -> Weights.

The tokens of n sequences stand end to end; `boundaries` says where each sequence begins and ends. Outside the
mask, and where a token has become impossible, log_ratio is -inf; any finite weight will do there.
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
    """A further factor of each token, from log(prox/mu) [t]: its own prox/mu, or with `level` "sequence" the product over its response.
    Above `cap` and below `floor`, 0 (IcePop), or with `above` "truncate" that bound (truncated importance sampling)."""
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


# The policy gradient on samples from older weights: AIPO (LlamaRL, section 6) and its relatives, which weight tokens by other rules.


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

    `kl_coef` multiplies an estimate of the KL divergence from the reference. With `kl` "loss" it is added to the loss, token by token. With
    `kl` "reward" its sum over a response's tokens is subtracted from the reward (RLOO, arXiv:2402.14740).

    A batch of rollouts may make several optimizer steps. mu has sampled it, and prox, the proximal policy, is the policy before the first
    of them. `ratio` says which ratio r the rule bounds, and by what each token's weight is multiplied besides:

        behavior    r = pi/mu
        proximal    r = pi/prox            prox counts as what has sampled the tokens (PPO): the lag of prox behind mu is ignored
        decoupled   r = pi/prox            times prox/mu, or 0 where that is above `behavior_cap` (AReaL, arXiv:2505.24298) or
                    below `behavior_floor` (IcePop); `behavior_level` and `behavior_above` change this (weights.py)

    `entropy_coefficient` times the entropy of each token's distribution is subtracted from the loss, with the same mean.
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
    distillation: Distillation | None = None  # adds a divergence from teachers (megarl.teachers.loss)
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
        Teachers change the advantages, or add their own terms (megarl/teachers/loss.py).

        The value is that of the published objective. It is -w A log pi if w is a constant there (AIPO, CISPO, REINFORCE). It is -min(r A,
        clip(r) A) if the objective is differentiated through r; the gradient is the same.

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
        """Means over tokens, or over pairs; NaN if the step trained on nothing, or has no pair."""
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


# Negative log-likelihood: supervised learning with the same trainer (the warm start).


def nll_loss(logprobs: Tensor, microbatch: Microbatch) -> LossOutput:
    """-sum of the unmasked log-probs [t]."""
    mask = microbatch.loss_mask
    return LossOutput(-torch.where(mask, logprobs, 0.0).sum(), {"tokens": mask.sum()})
