"""On-policy distillation: draws the policy pi towards teachers q on responses that it has sampled
itself, by the reverse KL divergence

    KL(pi || q) = sum over tokens v of pi(v) (log pi(v) - log q(v)) at each position.

`over` says how much of q is known.

Over sampled tokens, log pi(y) - log q(y) of a token y estimates the divergence. The policy gradient
with the advantage -(log pi(y) - log q(y)) reduces it (Thinking Machines, "On-Policy Distillation",
2025). This advantage is added to that of the reward. The algorithm's rule weights the sum as any
other advantage, and so corrects for old samples as far as the rule does. pi is the current policy.

Over the vocabulary, or over the likeliest tokens (kernels/chunked_kl.py; the bucket for the rest:
arXiv:2608.14728), the divergence is a term of the loss with its own gradient through pi (GKD,
arXiv:2306.13649, with lambda = 1). Given the tokens before a position, it is exact whichever
weights have sampled the token there, so it is not weighted. That older weights have sampled the
tokens before it is not corrected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class TeacherTokens(NamedTuple):
    """One teacher's numbers for t tokens."""

    # [t] over sampled tokens: the teacher's log-probs; otherwise the policy's divergence from it,
    # differentiable
    values: Tensor
    is_known: Tensor  # [t] bool; elsewhere values are arbitrary


class Terms(NamedTuple):
    advantages: Tensor | float  # [t] to be added to the reward's advantages
    loss: Tensor | float  # [t] to be added to the loss
    sums: dict[str, Tensor]


@dataclass(frozen=True)
class Distillation:
    coef: float
    sampled: bool  # over sampled tokens only
    teachers: Mapping[str, float]  # teacher -> weight, in the order of LossInputs.teachers

    def __call__(
        self,
        log_pi: Tensor,
        correction: Tensor,
        possible: Tensor,
        teacher_tokens: Sequence[TeacherTokens],
    ) -> Terms:
        """log_pi: [t], a constant; correction: [t], the weight of each token in means over the
        policy's tokens; possible: [t] bool, where log_pi is known and finite. Sums, for each
        teacher: its divergence, and the number of tokens for which it is known.
        """
        advantages: Tensor | float = 0.0
        loss: Tensor | float = 0.0
        sums = {}
        for (name, weight), (values, is_known) in zip(
            self.teachers.items(), teacher_tokens, strict=True
        ):
            is_counted = is_known & possible if self.sampled else is_known
            divergence = torch.where(is_counted, log_pi - values if self.sampled else values, 0.0)
            if self.sampled:
                advantages = advantages - self.coef * weight * divergence
            else:
                loss = loss + self.coef * weight * divergence
            sums |= {
                _sum(name): (correction * divergence if self.sampled else divergence)
                .detach()
                .sum(),
                _tokens(name): is_counted.sum(),
            }
        return Terms(advantages, loss, sums)

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """For each teacher, means over the tokens that it has judged; NaN if there are none."""
        means = {}
        for name in self.teachers:
            means[name] = sums.get(_sum(name), 0.0) / (sums.get(_tokens(name)) or float("nan"))
        total = sum(weight * means[name] for name, weight in self.teachers.items())
        return {"distill/kl": total, **{f"distill/{name}/kl": mean for name, mean in means.items()}}


def _sum(name: str) -> str:
    return f"distill {name}"


def _tokens(name: str) -> str:
    return f"distill {name} tokens"
