"""Losses on single tokens: AIPO (LlamaRL, section 6) and its relatives, with their KL estimates,
and supervised learning.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.advantages import Baseline, GroupLoss
from megarl.algorithms.base import LossInputs, LossOutput
from megarl.critic.losses import Gae
from megarl.teachers.loss import Distillation

# from -d on, k3 goes on as its tangent, so that one absurd token cannot make its exponential
# infinite
_MOST_DIFFERENCE = 20.0
# bound of a log-ratio where no other bound applies, so that one absurd token cannot make means,
# sums or weights infinite
_HIGHEST_LOG_RATIO = 20.0
_INFINITE = 1e30
# only for metrics, so that one absurd token cannot make a mean infinite
_MAX_REPORTED_LOG_RATIO = 20.0
_METRICS = {
    "is_ratio": "is_ratio/mean",
    "is_ratio_clipped": "is_ratio/clipped_fraction",
    "proximal_ratio": "proximal_ratio/mean",
    "behavior_ratio": "behavior_ratio/mean",
    "behavior_ratio_capped": "behavior_ratio/capped_fraction",
    "kl": "kl/mean",
}
_PAIR_METRICS = {"pair_margin": "pairs/margin", "pair_accuracy": "pairs/accuracy"}


class Weights(NamedTuple):
    weight: Tensor  # [t]
    clipped: Tensor  # [t] bool: whether the weight differs from the ratio
    # [t] s, if the objective is s A with gradient w A grad log pi; None: the objective is w A log
    # pi
    surrogate: Tensor | None = None


class RuleInputs(NamedTuple):
    """The tokens of n sequences, end to end, and the bounds of their ratios.

    These are also the arguments of a user's own rule, in this order.
    """

    # [t]; -inf outside the mask, and for a token that has become impossible: any finite weight
    # will do there
    log_ratio: Tensor
    advantages: Tensor  # [t]
    mask: Tensor  # [t] bool
    boundaries: Tensor  # [n + 1] where each sequence begins and ends
    rho_min: float
    rho: float

    @property
    def low(self) -> float:
        return _log(self.rho_min)

    @property
    def high(self) -> float:
        return _log(self.rho)

    def token_counts(self) -> Tensor:
        """[n] the tokens of each response, but at least 1."""
        return segment_counts(self.mask, self.boundaries, self.log_ratio.dtype)


Rule = Callable[[RuleInputs], Weights]


@dataclass(frozen=True)
class PolicyGradient:
    """A policy-gradient algorithm.

    `weigh`, with bounds `rho_min` and `rho`, weights tokens; `baseline` turns rewards into
    advantages.

    `loss_mean` "token": all tokens of a mini-batch count equally; "sequence": all responses do,
    whatever their length; "sequence_sum": a response's tokens are summed and responses averaged, so
    that the actions of the policy are whole responses.

    `kl_coef` multiplies an estimate of the KL divergence from the reference. With `kl` "loss" the
    product is added to the loss, token by token. With `kl` "reward" its sum over a response's
    tokens is subtracted from the reward (RLOO, arXiv:2402.14740).

    A batch of rollouts may be trained on in several optimizer steps. The policy mu has sampled it;
    prox, the proximal policy, is the policy before the first of these steps. `ratio` says which
    ratio r the rule bounds, and which further factor the weight of each token has:

        behavior    r = pi/mu
        proximal    r = pi/prox     treats the tokens as sampled from prox (PPO); ignores that prox
                                    differs from mu
        decoupled   r = pi/prox     factor prox/mu, or 0 where that is above `behavior_cap` (AReaL,
                                    arXiv:2505.24298) or below `behavior_floor` (IcePop);
                                    `behavior_level` and `behavior_above` change it (`lag_weights`)

    The entropy of each token's distribution, times `entropy_coefficient`, is subtracted from the
    loss, with the same mean.
    """

    weigh: Rule
    rho_min: float
    rho: float
    baseline: Baseline
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
    # adds a divergence from teachers (megarl.teachers.loss)
    distillation: Distillation | None = None
    entropy_coefficient: float = 0.0

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef != 0.0 or self.group_loss is not None

    @property
    def needs_proximal(self) -> bool:
        return self.ratio != "behavior"

    @property
    def skip_zero(self) -> bool:
        # A penalty, an entropy bonus or a teacher has a gradient at zero advantage; a loss of pairs
        # has none.
        penalty = (
            self.kl_coef != 0.0
            or self.entropy_coefficient != 0.0
            or (self.group_loss is not None and not self.group_loss.pairs)
        )
        return (
            self.skip_zero_advantage
            and not penalty
            and self.gae is None
            and self.distillation is None
        )

    def penalties(self, policy: Tensor, reference: Tensor) -> Tensor:
        return self.kl_coef * ESTIMATORS[self.kl_estimator](policy.double() - reference.double())

    @property
    def penalizes_rewards(self) -> bool:
        return self.kl_coef != 0.0 and self.kl == "reward"

    def penalty(self, policy: Tensor, reference: Tensor) -> float:
        return self.penalties(policy, reference).sum().item()

    def advantages(self, rewards: Tensor) -> Tensor:
        return self.baseline(rewards)

    def loss(self, logprobs: Tensor, microbatch: LossInputs) -> LossOutput:
        """Loss whose gradient is -sum_t w A grad log pi, with w from `weigh` and `ratio`, plus
        kl_coef times a KL penalty if `kl` is "loss".

        logprobs: [t], float32 or wider. Ratios are constants for autograd. A token that the trainer
        gives probability 0 (log-prob -inf) adds nothing. NaN is not hidden: it reaches the loss.

        KL penalty per token, with k2: c (log pi - log ref)^2 / 2, where c is min(r, rho) times the
        further factor of `ratio`. Its gradient is c (log pi - log ref) grad log pi. With c = pi/mu
        and tokens from mu, the expectation is exactly the gradient of KL(pi || ref) at each
        position. With k3 the gradient is c (1 - ref/pi) grad log pi, which is that of KL(ref ||
        pi). The metric `kl` sums c (ref/pi - 1 - log(ref/pi)), which is never negative and an
        unbiased estimate of the divergence. Departure from the paper: the penalty acts on each
        position by itself, not through the return of earlier tokens. Teachers change the
        advantages, or add their own terms (megarl/teachers/loss.py).

        The value of the loss is that of the published objective: -w A log pi if w is a constant in
        it (AIPO, CISPO, REINFORCE), or -min(r A, clip(r) A) if the paper differentiates through r.
        The gradient is the same.

        Sums: tokens, is_ratio (pi/mu), is_ratio_clipped (tokens whose weight is not r), and kl if
        there is a reference. With a proximal policy: proximal_ratio (pi/prox), behavior_ratio
        (prox/mu), and, if decoupled, behavior_ratio_capped (tokens outside floor and cap). Raises
        ValueError if kl_coef is not 0 and no reference is given.
        """
        mask = microbatch.loss_mask
        advantages = microbatch.advantages
        reference = microbatch.reference_logprobs
        if reference is None and self.kl_coef:
            raise ValueError(f"kl_coef is {self.kl_coef}, but there are no reference log-probs")
        possible = mask & (logprobs != -math.inf)
        log_pi = torch.where(possible, logprobs, 0.0)
        pi = torch.where(mask, logprobs.detach(), -math.inf)
        log_ratio = _log_ratio(pi, microbatch.mu_logprobs)
        sums = {"tokens": mask.sum(), "is_ratio": _reported(log_ratio)}
        factor = torch.ones_like(pi)
        if self.needs_proximal:
            proximal_logprobs = microbatch.proximal_logprobs
            proximal = pi
            if proximal_logprobs is not None:
                proximal = torch.where(mask, proximal_logprobs, -math.inf)
            log_ratio = _log_ratio(pi, proximal)
            lag = _log_ratio(proximal, microbatch.mu_logprobs)
            sums |= {"proximal_ratio": _reported(log_ratio), "behavior_ratio": _reported(lag)}
            if self.ratio == "decoupled":
                factor, capped, _ = lag_weights(
                    lag,
                    mask,
                    microbatch.boundaries,
                    floor=self.behavior_floor,
                    cap=self.behavior_cap,
                    level=self.behavior_level,
                    above=self.behavior_above,
                )
                sums["behavior_ratio_capped"] = (capped & mask).sum()
        correction = factor * log_ratio.clamp(max=math.log(self.rho)).exp()
        penalties: Tensor | float = 0.0
        if self.distillation is not None:
            distilled_advantages, penalties, distilled_sums = self.distillation(
                log_pi.detach(), correction, possible, microbatch.teachers
            )
            advantages = advantages + distilled_advantages
            sums = sums | distilled_sums
        inputs = RuleInputs(
            log_ratio, advantages, mask, microbatch.boundaries, self.rho_min, self.rho
        )
        weight, clipped, surrogate = self.weigh(inputs)
        sums["is_ratio_clipped"] = (clipped & mask).sum()
        advantages = torch.where(mask, advantages, 0.0)
        terms = -factor * weight * advantages * log_pi
        if surrogate is not None:
            # changes the value, not the gradient
            terms = terms + (-factor * surrogate * advantages - terms).detach()
        terms = penalties + terms
        if self.entropy_coefficient:
            terms = terms - self.entropy_coefficient * torch.where(mask, _entropy(microbatch), 0.0)
        if reference is not None:
            difference = log_pi - torch.where(possible, reference, 0.0)
            if self.kl_coef and self.kl == "loss":
                estimate = ESTIMATORS[self.kl_estimator](difference)
                terms = terms + self.kl_coef * correction * estimate
            sums["kl"] = (correction * k3(difference.detach())).sum()
        return LossOutput(self._sum(terms, mask, microbatch.boundaries), sums)

    def denominator(self, tokens: int, samples: int) -> float:
        """The divisor of a mini-batch's summed loss: its policy tokens or its samples, including
        samples of zero advantage.
        """
        return float(tokens if self.loss_mean == "token" else samples)

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Means over tokens, or over pairs. NaN if the step trained on nothing or has no pair."""
        tokens = sums.get("tokens", 0.0) or math.nan
        default_sums = {name: sums.get(name, 0.0) for name in ("is_ratio", "is_ratio_clipped")}
        metrics = {}
        for name, value in (default_sums | sums).items():
            if name in _METRICS:
                metrics[_METRICS[name]] = value / tokens
        if self.distillation is not None:
            metrics |= self.distillation.metrics(sums)
        if "pairs" in sums:
            metrics["pairs/fraction"] = sums["pairs"] / sums["prompts"]
            for name, metric in _PAIR_METRICS.items():
                metrics[metric] = sums[name] / (sums["pairs"] or math.nan)
        return metrics

    def _sum(self, terms: Tensor, mask: Tensor, boundaries: Tensor) -> Tensor:
        """The sum of `terms` over all tokens, or of their means over the sequences."""
        if self.loss_mean != "sequence":
            return terms.sum()
        counts = segment_counts(mask, boundaries, terms.dtype)
        return (segment_sums(terms, boundaries) / counts).sum()


def _log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """log(of / to).

    It is -inf where `numerator` is impossible (log-prob -inf), as it is outside the mask.
    """
    return torch.where(numerator == -math.inf, -math.inf, numerator - denominator)


def _entropy(microbatch: LossInputs) -> Tensor:
    if microbatch.entropy is None:
        raise ValueError("entropy_coefficient is not 0, but the microbatch has no entropy")
    return microbatch.entropy


def _reported(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(max=_MAX_REPORTED_LOG_RATIO).exp().sum()


def nll_loss(logprobs: Tensor, microbatch: LossInputs) -> LossOutput:
    """-sum of the unmasked log-probs [t]."""
    mask = microbatch.loss_mask
    return LossOutput(-torch.where(mask, logprobs, 0.0).sum(), {"tokens": mask.sum()})


def clamped(inputs: RuleInputs) -> Weights:
    """min(pi/mu, rho): AIPO (LlamaRL, section 6).

    With `rho_min` above 0, also clamps from below: CISPO (MiniMax-M1, arXiv:2506.13585).
    """
    log_ratio = inputs.log_ratio
    is_outside = (log_ratio < inputs.low) | (log_ratio > inputs.high)
    return Weights(log_ratio.clamp(inputs.low, inputs.high).exp(), is_outside)


def segment_sums(values: Tensor, boundaries: Tensor) -> Tensor:
    """[n] the sum of `values` (floats [t]) in each of n sequences end to end; differentiable.

    `boundaries` [n + 1] int32: sequence i has tokens boundaries[i] to boundaries[i + 1] - 1.

    Bitwise deterministic, also on GPUs, which ranks that hold copies of a weight rely on.
    """
    return torch.segment_reduce(values, "sum", offsets=boundaries)


def segment_counts(mask: Tensor, boundaries: Tensor, dtype: torch.dtype) -> Tensor:
    """[n] how many tokens of each sequence `mask` [t] selects, but at least 1."""
    return segment_sums(mask.to(dtype), boundaries).clamp(min=1)


def spread(values: Tensor, boundaries: Tensor, tokens: int) -> Tensor:
    """[tokens] for each token, the value of its sequence in `values` [n].

    A constant for autograd.
    """
    return values.detach().repeat_interleave(boundaries.diff(), output_size=tokens)


def k1(difference: Tensor) -> Tensor:
    return difference


def k2(difference: Tensor) -> Tensor:
    return difference.square() / 2


def k3(difference: Tensor) -> Tensor:
    """exp(-d) - 1 + d. Below d = -20 its tangent there, which still pulls towards the reference."""
    bounded = (-difference).clamp(max=_MOST_DIFFERENCE)
    return bounded.exp() * (1 - difference - bounded) - 1 + difference


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def clipped(inputs: RuleInputs, dual_clip: float) -> Weights:
    """The gradient of min(r A, clip(r, rho_min, rho) A), r = pi/mu (PPO; GRPO, arXiv:2402.03300).

    The gradient is 0 for tokens whose ratio is beyond the bound that their advantage pushes it
    towards. With a negative advantage it is also 0 where the ratio is above both `dual_clip` (Ye et
    al., arXiv:1912.09729) and `rho`.
    """
    log_ratio = inputs.log_ratio
    is_good = inputs.advantages > 0
    highest = _log(max(dual_clip, inputs.rho))
    is_outside = (log_ratio < inputs.low) | (log_ratio > highest)
    is_beyond = torch.where(is_good, log_ratio > inputs.high, is_outside)
    most = min(highest, _HIGHEST_LOG_RATIO)
    surrogate = torch.where(
        is_good, log_ratio.clamp(max=inputs.high), log_ratio.clamp(inputs.low, most)
    ).exp()
    weight = torch.where(is_beyond, 0.0, log_ratio.clamp(max=most).exp())
    return Weights(weight, is_beyond | (log_ratio > _HIGHEST_LOG_RATIO), surrogate)


def sequence_clipped(inputs: RuleInputs, dual_clip: float) -> Weights:
    """Like `clipped`, with the geometric mean of a response's ratios as r (GSPO, arXiv:2507.18071,
    equations 5 to 7).

    With loss_mean=sequence the gradient is GSPO's.
    """
    sums = _sequence_sums(inputs.log_ratio, inputs.mask, inputs.boundaries)
    means = spread(sums / inputs.token_counts(), inputs.boundaries, len(inputs.mask))
    return clipped(inputs._replace(log_ratio=means), dual_clip)


def response_clipped(inputs: RuleInputs, dual_clip: float) -> Weights:
    """Like `clipped`, with the product of a response's ratios as r (Proximal RLOO,
    arXiv:2410.18252, appendix B).

    With loss_mean=sequence_sum the gradient is Proximal RLOO's.
    """
    log_ratio = _response_log_ratio(inputs.log_ratio, inputs.mask, inputs.boundaries)
    weight, is_beyond, surrogate = clipped(inputs._replace(log_ratio=log_ratio), dual_clip)
    assert surrogate is not None
    tokens = spread(inputs.token_counts(), inputs.boundaries, len(inputs.mask))
    # so that its sum counts each response once
    return Weights(weight, is_beyond, surrogate / tokens)


def masked(inputs: RuleInputs) -> Weights:
    """pi/mu inside the bounds, 0 outside: ignores tokens on which trainer and generator disagree
    too much (IcePop, 2025).
    """
    weight, is_outside, _ = clamped(inputs)
    return Weights(torch.where(is_outside, 0.0, weight), is_outside)


def tapered(inputs: RuleInputs) -> Weights:
    """1 for responses of positive advantage; for the others, the ratio of the whole response, at
    most `rho` (TOPR, arXiv:2503.14286).
    """
    log_ratio = _response_log_ratio(inputs.log_ratio, inputs.mask, inputs.boundaries)
    is_good = inputs.advantages > 0
    weight = torch.where(is_good, 1.0, log_ratio.clamp(max=inputs.high).exp())
    return Weights(weight, ~is_good & (log_ratio > inputs.high))


def uncorrected(inputs: RuleInputs) -> Weights:
    """1, as if the current weights had sampled everything: the baseline in LlamaRL's figure 8."""
    return Weights(torch.ones_like(inputs.log_ratio), torch.zeros_like(inputs.mask))


def lag_weights(
    log_lag: Tensor,
    mask: Tensor,
    boundaries: Tensor,
    floor: float,
    cap: float,
    level: str,
    above: str,
) -> Weights:
    """[t] a further factor of each token: prox/mu, from log_lag = log(prox/mu) [t].

    With `level` "sequence" it is the product over the response. Above `cap` and below `floor` it
    becomes 0 (IcePop), or with `above` "truncate" that bound (truncated importance sampling).
    """
    if level == "sequence":
        log_lag = _response_log_ratio(log_lag, mask, boundaries)
    low = _log(floor)
    high = _log(cap)
    is_beyond = (log_lag < low) | (log_lag > high)
    weight = log_lag.clamp(low, min(high, _HIGHEST_LOG_RATIO)).exp()
    if above != "truncate":
        weight = torch.where(is_beyond, 0.0, weight)
    return Weights(weight, is_beyond | (log_lag > _HIGHEST_LOG_RATIO))


def _response_log_ratio(log_ratio: Tensor, mask: Tensor, boundaries: Tensor) -> Tensor:
    """[t] for each token, the log-ratio of its whole response."""
    return spread(_sequence_sums(log_ratio, mask, boundaries), boundaries, len(mask))


def _sequence_sums(log_ratio: Tensor, mask: Tensor, boundaries: Tensor) -> Tensor:
    """[n] sums of `log_ratio` over the unmasked tokens of each sequence.

    Infinite ones count as 1e30, so that they add up.
    """
    finite = log_ratio.nan_to_num(nan=math.nan, posinf=_INFINITE, neginf=-_INFINITE)
    return segment_sums(torch.where(mask, finite, 0.0), boundaries)


def _log(bound: float) -> float:
    if bound > 0:
        return math.log(bound)
    return -math.inf
