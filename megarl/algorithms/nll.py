"""Negative log-likelihood: supervised learning with the same trainer (the warm start)."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.base import LossOutput, Microbatch


def nll_loss(logprobs: Tensor, microbatch: Microbatch) -> LossOutput:
    """-sum of the unmasked log-probs [t]."""
    mask = microbatch.loss_mask
    return LossOutput(-torch.where(mask, logprobs, 0.0).sum(), {"tokens": mask.sum()})
