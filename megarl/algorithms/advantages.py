"""Advantages from the rewards of a prompt's samples, and losses that need several samples of a
prompt at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from megarl.config.algorithms import CRITIC

_SMALLEST_STD = 1e-6
Baseline = Callable[[Tensor], Tensor]
"""Rewards [G, n] of n samples for each of G prompts -> their advantages [G, n]."""
Loss = Callable[[Tensor, Tensor, float], Tensor]
"""(advantages [G, n], log_ratio [G, n], beta) -> losses [G] of the prompts, with log_ratio = log
pi(y) - log ref(y) of whole responses.
"""


def mean_baseline(rewards: Tensor) -> Tensor:
    """Reward minus the mean reward of the prompt's samples (LlamaRL, section 6; Dr. GRPO,
    arXiv:2503.20783).

    Args: rewards [G, n]. Returns: advantages [G, n]. They are exactly 0 in groups whose rewards are
    all equal, however the mean is rounded, so that those groups can be left out of training.
    """
    undecided = (rewards != rewards[:, :1]).any(dim=1, keepdim=True)
    return torch.where(undecided, rewards - rewards.mean(dim=1, keepdim=True), 0.0)


def normalized(rewards: Tensor) -> Tensor:
    """`mean_baseline` divided by the standard deviation of the prompt's rewards, with denominator n
    - 1 (GRPO, arXiv:2402.03300).
    """
    return mean_baseline(rewards) / (rewards.std(dim=1, keepdim=True) + _SMALLEST_STD)


def batch_normalized(rewards: Tensor) -> Tensor:
    """Reward minus the mean of the prompt's samples, divided by the standard deviation of these
    differences over the whole batch, not over the prompt (REINFORCE++-baseline, arXiv:2501.03262,
    section 3.2).
    """
    differences = mean_baseline(rewards)
    return differences / (differences.std() + _SMALLEST_STD)


def leave_one_out(rewards: Tensor) -> Tensor:
    """Reward minus the mean reward of the prompt's other samples (RLOO, arXiv:2402.14740)."""
    n = rewards.shape[1]
    return mean_baseline(rewards) * (n / (n - 1))


def best(rewards: Tensor) -> Tensor:
    """n for the best of a prompt's n samples (the first, if several are best), 0 for the others.

    Its mean over all samples weighs prompts equally.
    """
    n = rewards.shape[1]
    return n * torch.nn.functional.one_hot(rewards.argmax(dim=1), n).to(rewards.dtype)


def best_and_worst(rewards: Tensor) -> Tensor:
    """n for the best of a prompt's n samples, -n for the worst (the first, if several are), 0 for
    the others. All 0 if all are equal.
    """
    return best(rewards) - best(-rewards)


ADVANTAGES: dict[str, Baseline] = {
    "mean": mean_baseline,
    "normalized": normalized,
    "batch_normalized": batch_normalized,
    "leave_one_out": leave_one_out,
}


def advantages_of_sets(baseline: Baseline, sets: Sequence[Sequence[float]]) -> list[list[float]]:
    """`baseline` on each of several sets of rewards, which may differ in size.

    A set of one reward has the advantage 0, since there is nothing to compare it with.
    """
    # over the batch, not over sets of one size
    rule = mean_baseline if baseline is batch_normalized else baseline
    places_by_size: dict[int, list[int]] = {}
    for place, rewards in enumerate(sets):
        places_by_size.setdefault(len(rewards), []).append(place)
    rows = [torch.zeros(len(rewards), dtype=torch.float64) for rewards in sets]
    for size, places in places_by_size.items():
        if size > 1:
            same_size = torch.tensor([sets[place] for place in places], dtype=torch.float64)
            for place, row in zip(places, rule(same_size), strict=True):
                rows[place] = row
    if baseline is batch_normalized and rows:
        scale = torch.cat(rows).std() + _SMALLEST_STD
        rows = [row / scale for row in rows]
    return [row.tolist() for row in rows]


def undivided(rewards: Tensor) -> Tensor:
    """The rewards themselves.

    With a critic, advantages are per token, and megarl.critic.losses computes them.
    """
    return rewards


def nothing(rewards: Tensor) -> Tensor:
    """0 for every sample: the policy learns from teachers alone."""
    return torch.zeros_like(rewards)


CHOICES: dict[str, Baseline] = {
    "best": best,
    "best_and_worst": best_and_worst,
    CRITIC: undivided,
    "none": nothing,
}  # for algorithms that train on chosen samples only


def dpo(advantages: Tensor, log_ratio: Tensor, beta: float) -> Tensor:
    """-log sigmoid(beta gap), where gap is the log-ratio of the best response minus that of the
    worst. This is online DPO (arXiv:2402.04792); the loss is DPO's (arXiv:2305.18290, equation 7).
    """
    return torch.where(_paired(advantages), softplus(-beta * _gap(advantages, log_ratio)), 0.0)


def ipo(advantages: Tensor, log_ratio: Tensor, beta: float) -> Tensor:
    """(gap - 1 / (2 beta))^2 (IPO, arXiv:2310.12036, equation 17; its tau is beta)."""
    distance = _gap(advantages, log_ratio) - 1 / (2 * beta)
    return torch.where(_paired(advantages), distance.square(), 0.0)


def copg(advantages: Tensor, log_ratio: Tensor, beta: float) -> Tensor:
    """CoPG (arXiv:2406.19185): the loss of a pair is -(dR - beta/2 dl) dl, where dR and dl are its
    differences in reward R and log-ratio l.

    Returns half the mean over all pairs of the prompt's responses. That equals -mean(A l) + beta/2
    var(l), where A is R minus the mean of the other rewards, and the variance has denominator n -
    1. The weight of a response is A minus beta times its log-ratio's difference from the mean of
    the others. This is RLOO with the KL divergence in the reward.
    """
    return beta / 2 * log_ratio.var(dim=1) - (advantages * log_ratio).mean(dim=1)


class GroupWeights(NamedTuple):
    weights: Tensor  # [G, n], used in place of advantages with loss_mean=sequence_sum
    loss: float  # summed over the prompts
    sums: dict[str, float]  # number of pairs; pair_margin and pair_accuracy summed over them


@dataclass(frozen=True)
class GroupLoss:
    """A loss on whole prompts: `loss` with its `beta`, which is above 0.

    `pairs`: it uses only the best and the worst response.

    It needs the log-probs of several responses to a prompt at once. Packing puts these into
    different microbatches, and on different ranks. So before an optimizer step, the policy's
    log-probs of the mini-batch are computed once (executors/batch_steps.py). They give the weight
    w(y) of each response, which is minus the derivative of the loss by log pi(y). The sum of -w(y)
    grad log pi(y) is then exactly the gradient of the loss, however the mini-batch is split.
    """

    loss: Loss
    beta: float
    pairs: bool

    def weigh(self, advantages: Tensor, log_ratio: Tensor) -> GroupWeights:
        """Args: both [G, n], float64.

        With `pairs`, the log-ratio of a response of zero advantage is not used.

        Sums: the prompts whose best and worst rewards differ (pairs), beta times their gaps, and
        how many of the gaps are above 0.
        """
        variable = log_ratio.detach().requires_grad_()
        with torch.enable_grad():
            losses = self.loss(advantages, variable, self.beta)
            (slopes,) = torch.autograd.grad(losses.sum(), variable)
        pair = best_and_worst(advantages)
        gap = _gap(pair, log_ratio)
        sums = {
            "pairs": _paired(pair).sum().item(),
            "pair_margin": (self.beta * gap).sum().item(),
            "pair_accuracy": (gap > 0).sum().item(),
        }
        # the trainer takes a mean over samples; the loss is a mean over prompts
        weights = -slopes * log_ratio.shape[1]
        return GroupWeights(weights, losses.sum().item(), sums)


def _paired(advantages: Tensor) -> Tensor:
    return (advantages != 0).any(dim=1)


def _gap(advantages: Tensor, log_ratio: Tensor) -> Tensor:
    """[G]: log-ratio of the best response (positive advantage) minus that of the worst; 0 without a
    pair.
    """
    return torch.where(advantages != 0, advantages.sign() * log_ratio, 0.0).sum(dim=1)
