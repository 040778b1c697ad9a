"""On-policy distillation: the policy is drawn to teachers on the responses that it has sampled itself, by the reverse KL divergence.

    KL(pi || q) = sum over tokens v of pi(v) (log pi(v) - log q(v)), at each position, of policy pi from teacher q

`over` says how much of q is known.

Over the sampled tokens, log pi(y) - log q(y) of a token y estimates the divergence, and the policy gradient on the advantage
-(log pi(y) - log q(y)) lowers it (Thinking Machines, "On-Policy Distillation", 2025). This is added to the advantage that the reward
gives, and counts by the algorithm's rule like any other: so old samples are corrected for as far as the rule does that. pi is the current
policy.

Over the vocabulary, or the likeliest tokens (kernels/chunked_kl.py; the bucket for the rest: arXiv:2608.14728), the divergence is a term
of the loss with its own gradient through pi (GKD, arXiv:2306.13649, with lambda = 1). Given the tokens before it, it is exact whichever
weights have sampled the token, so it is not weighted. There is no correction for older weights having sampled the tokens before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Taught(NamedTuple):
    """By one teacher, of t tokens."""

    values: Tensor  # [t] over sampled tokens: its log-probs of them; else the policy's divergence from it, differentiable
    known: Tensor  # [t] bool; elsewhere values are arbitrary


class Terms(NamedTuple):
    advantages: Tensor | float  # [t] to be added to those of the reward
    loss: Tensor | float  # [t] to be added to the loss
    sums: dict[str, Tensor]


@dataclass(frozen=True)
class Distillation:
    coef: float
    sampled: bool  # over the sampled tokens alone
    teachers: Mapping[str, float]  # the teachers' weights, in the order of a microbatch's entries

    def __call__(self, log_pi: Tensor, correction: Tensor, possible: Tensor, taught: Sequence[Taught]) -> Terms:
        """log_pi: [t] a constant; correction: [t] what each token counts by in means over the policy's tokens; possible: [t] bool, tokens
        that log_pi is known and finite of. Sums, for each teacher: its divergence, and how many tokens it is known of."""
        advantages: Tensor | float = 0.0
        loss: Tensor | float = 0.0
        sums = {}
        for (name, weight), (values, known) in zip(self.teachers.items(), taught, strict=True):
            counted = known & possible if self.sampled else known
            told = torch.where(counted, log_pi - values if self.sampled else values, 0.0)
            if self.sampled:
                advantages = advantages - self.coef * weight * told
            else:
                loss = loss + self.coef * weight * told
            sums |= {_sum(name): (correction * told if self.sampled else told).detach().sum(), _tokens(name): counted.sum()}
        return Terms(advantages, loss, sums)

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Means over the tokens that each teacher has judged; NaN if it judged none."""
        means = {name: sums.get(_sum(name), 0.0) / (sums.get(_tokens(name)) or float("nan")) for name in self.teachers}
        whole = sum(weight * means[name] for name, weight in self.teachers.items())
        return {"distill/kl": whole, **{f"distill/{name}/kl": mean for name, mean in means.items()}}


def _sum(name: str) -> str:
    return f"distill {name}"


def _tokens(name: str) -> str:
    return f"distill {name} tokens"
