"""Losses of a prompt's responses together: each needs the log-probs of several responses at once.

Packing puts these into different microbatches, and on different ranks. So before an optimizer step the policy's log-probs of its
mini-batch are taken once (executors/batch_steps.py), and from them each response's weight w(y), which is minus the loss's derivative by
log pi(y). The sum of -w(y) grad log pi(y) is then exactly the loss's gradient, however the mini-batch is split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from megarl.algorithms.advantages import best_and_worst

Loss = Callable[[Tensor, Tensor, float], Tensor]
"""(advantages [G, n], log_ratio [G, n], beta) -> losses [G] of the prompts, with log_ratio = log pi(y) - log ref(y) of whole responses."""


def dpo(advantages: Tensor, log_ratio: Tensor, beta: float) -> Tensor:
    """-log sigmoid(beta gap), the gap being that of the log-ratios of best and worst: online DPO (arXiv:2402.04792; DPO, arXiv:2305.18290,
    equation 7)."""
    return torch.where(_paired(advantages), softplus(-beta * _gap(advantages, log_ratio)), 0.0)


def ipo(advantages: Tensor, log_ratio: Tensor, beta: float) -> Tensor:
    """(gap - 1 / (2 beta))^2 (IPO, arXiv:2310.12036, equation 17; its tau is beta)."""
    return torch.where(_paired(advantages), (_gap(advantages, log_ratio) - 1 / (2 * beta)).square(), 0.0)


def copg(advantages: Tensor, log_ratio: Tensor, beta: float) -> Tensor:
    """CoPG (arXiv:2406.19185): of a pair it is -(dR - beta/2 dl) dl, with dR and dl its differences in reward R and log-ratio l.

    Returned is half the mean over all pairs of the prompt's responses. With advantages A = R minus the mean of the others' rewards that is
    -mean(A l) + beta/2 var(l), n - 1 in the variance's denominator. The weight of a response is then A - beta times the same of l: RLOO's,
    with the KL divergence in the reward.
    """
    return beta / 2 * log_ratio.var(dim=1) - (advantages * log_ratio).mean(dim=1)


class GroupWeights(NamedTuple):
    weights: Tensor  # [G, n] in the place of advantages, with loss_mean=sequence_sum
    loss: float  # sum over the prompts
    sums: dict[str, float]  # pairs, and sums over them: pair_margin, pair_accuracy


@dataclass(frozen=True)
class GroupLoss:
    """`loss` with its `beta`, which is above 0. `pairs`: it is of best and worst alone."""

    loss: Loss
    beta: float
    pairs: bool

    def weigh(self, advantages: Tensor, log_ratio: Tensor) -> GroupWeights:
        """All [G, n], float64. A response of zero advantage may have any log-ratio if `pairs`.

        Sums: prompts whose best response has another reward than their worst; beta times the gap of these; those whose gap is above 0.
        """
        variable = log_ratio.detach().requires_grad_()
        with torch.enable_grad():
            losses = self.loss(advantages, variable, self.beta)
            (slopes,) = torch.autograd.grad(losses.sum(), variable)
        pair, gap = best_and_worst(advantages), _gap(best_and_worst(advantages), log_ratio)
        sums = {"pairs": _paired(pair), "pair_margin": self.beta * gap, "pair_accuracy": gap > 0}
        weights = -slopes * log_ratio.shape[1]  # of a mean over prompts, as a mean over samples
        return GroupWeights(weights, losses.sum().item(), {name: value.sum().item() for name, value in sums.items()})


GROUP_LOSSES: dict[str, Loss] = {"online_dpo": dpo, "ipo": ipo, "copg": copg}


def _paired(advantages: Tensor) -> Tensor:
    return (advantages != 0).any(dim=1)


def _gap(advantages: Tensor, log_ratio: Tensor) -> Tensor:
    """[G] of the best response's log-ratio, whose advantage is positive, to the worst's; 0 without a pair."""
    return torch.where(advantages != 0, advantages.sign() * log_ratio, 0.0).sum(dim=1)
