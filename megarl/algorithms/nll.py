"""Negative log-likelihood: supervised learning with the same trainer (the warm start)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.base import LossOutput, Microbatch


def nll_loss(logprobs: Tensor, mask: Tensor) -> LossOutput:
    """-sum of the unmasked log-probs. Args: logprobs [b, s], mask [b, s] bool."""
    return LossOutput(-torch.where(mask, logprobs, 0.0).sum(), {"tokens": mask.sum()})


@dataclass(frozen=True)
class Nll:
    needs_reference: bool = False
    skip_zero: bool = False

    def advantages(self, rewards: Tensor) -> Tensor:
        raise NotImplementedError("supervised learning has no rewards")

    def loss(self, logprobs: Tensor, microbatch: Microbatch) -> LossOutput:
        return nll_loss(logprobs, microbatch.loss_mask)
