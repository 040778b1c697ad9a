"""A critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.base import LossOutput, Microbatch


def value_loss(values: Tensor, microbatch: Microbatch, clip: float | None) -> LossOutput:
    """Half the sum over the policy's tokens of (V - R)^2 or, if that is more, of the same with V no further than `clip` from the value that
    the batch began with (Schulman et al. 2017, arXiv:1707.06347, in its implementation)."""
    mask, old, returns = microbatch.loss_mask, microbatch.old_values, microbatch.returns
    assert old is not None and returns is not None
    error, clipped = (values - returns).square(), torch.zeros_like(mask)
    if clip is not None:
        bounded = (old + (values - old).clamp(-clip, clip) - returns).square()
        clipped = bounded > error
        error = torch.maximum(error, bounded)
    sums = {"tokens": mask.sum(), "values": torch.where(mask, values.detach(), 0.0).sum(), "values_clipped": (clipped & mask).sum()}
    return LossOutput(torch.where(mask, error, 0.0).sum() / 2, sums)
