"""From the rewards of a prompt's samples to their advantages."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_SMALLEST_STD = 1e-6


def mean_baseline(rewards: Tensor) -> Tensor:
    """Reward minus the mean reward of the prompt's samples (LlamaRL, section 6; Dr. GRPO, arXiv:2503.20783).

    Args: rewards [G, n]. Returns: advantages [G, n], exactly 0 in groups whose rewards are all equal,
    whatever the rounding of the mean: those groups can then be left out of training.
    """
    undecided = (rewards != rewards[:, :1]).any(dim=1, keepdim=True)
    return torch.where(undecided, rewards - rewards.mean(dim=1, keepdim=True), 0.0)


def normalized(rewards: Tensor) -> Tensor:
    """The same, divided by the standard deviation of the prompt's rewards (n - 1 in its denominator): GRPO, arXiv:2402.03300."""
    return mean_baseline(rewards) / (rewards.std(dim=1, keepdim=True) + _SMALLEST_STD)


def batch_normalized(rewards: Tensor) -> Tensor:
    """Reward minus the mean of the prompt's samples, divided by the standard deviation of these differences over the whole batch, not over
    the prompt (REINFORCE++-baseline, arXiv:2501.03262, section 3.2)."""
    differences = mean_baseline(rewards)
    return differences / (differences.std() + _SMALLEST_STD)


def leave_one_out(rewards: Tensor) -> Tensor:
    """Reward minus the mean reward of the prompt's other samples (RLOO, arXiv:2402.14740)."""
    n = rewards.shape[1]
    return mean_baseline(rewards) * (n / (n - 1))


def best(rewards: Tensor) -> Tensor:
    """n for the best of a prompt's n samples, the first of several, and 0 for the others: a mean over samples is one over prompts."""
    n = rewards.shape[1]
    return n * torch.nn.functional.one_hot(rewards.argmax(dim=1), n).to(rewards.dtype)


def best_and_worst(rewards: Tensor) -> Tensor:
    """n for the best of a prompt's n samples, -n for the worst, each the first of several; 0 for the others. All 0 if all are equal."""
    return best(rewards) - best(-rewards)


ADVANTAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": mean_baseline,
    "normalized": normalized,
    "batch_normalized": batch_normalized,
    "leave_one_out": leave_one_out,
}


def undivided(rewards: Tensor) -> Tensor:
    """The rewards: a critic's advantages are those of tokens, and formed elsewhere (gae.py)."""
    return rewards


def nothing(rewards: Tensor) -> Tensor:
    """0, whatever the rewards: teachers alone are learned from."""
    return torch.zeros_like(rewards)


CHOICES: dict[str, Callable[[Tensor], Tensor]] = {
    "best": best,
    "best_and_worst": best_and_worst,
    "gae": undivided,
    "none": nothing,
}  # of algorithms that train on chosen samples; not for others
