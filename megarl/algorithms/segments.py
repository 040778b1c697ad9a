"""Sums over sequences that are laid end to end.

`boundaries` [n + 1] int32 are where n sequences begin and end in a row of t tokens: sequence i has tokens boundaries[i] to
boundaries[i + 1] - 1.
"""

from __future__ import annotations

import torch
from torch import Tensor


def segment_sums(values: Tensor, boundaries: Tensor) -> Tensor:
    """[n] of floats [t]; differentiable. The same bits at every call, also on GPUs: ranks that hold copies of a weight rely on it."""
    return torch.segment_reduce(values, "sum", offsets=boundaries)


def segment_counts(mask: Tensor, boundaries: Tensor, dtype: torch.dtype) -> Tensor:
    """[n]: how many of `mask` [t] are set in each sequence, but at least 1."""
    return segment_sums(mask.to(dtype), boundaries).clamp(min=1)


def spread(values: Tensor, boundaries: Tensor, tokens: int) -> Tensor:
    """[tokens], each the value [n] of its sequence; a constant for autograd."""
    return values.detach().repeat_interleave(boundaries.diff(), output_size=tokens)
