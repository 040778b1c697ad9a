"""Reward models from pairs of responses, of which one is preferred (Bradley and Terry 1952; Ouyang et al. 2022, arXiv:2203.02155, (1)).

    loss = mean over pairs of -log sigmoid(d),  d = score(chosen) - score(rejected) - margin

A pair's responses may be in different microbatches and on different ranks. So all scores are computed before the optimizer step, and the
step is made on a sum of scores with constant weights, which are the loss's derivatives: its gradient is the loss's.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.algorithms.base import LossOutput, Microbatch
from megarl.types import TrainSequence


class PairLoss(NamedTuple):
    weights: Tensor  # [B, 2]: the derivatives of the summed loss by the scores of chosen and rejected
    metrics: dict[str, float]  # means over the pairs


def bradley_terry(scores: Tensor, margins: Tensor) -> PairLoss:
    """Args: scores [B, 2] of chosen and rejected, margins [B]."""
    chosen, rejected = scores.unbind(dim=1)
    difference = chosen - rejected
    slope = -torch.sigmoid(margins - difference)
    metrics = {
        "loss": -F.logsigmoid(difference - margins).mean(),
        "accuracy": (difference > 0).double().mean(),
        "score_difference/mean": difference.mean(),
        "score/chosen": chosen.mean(),
        "score/rejected": rejected.mean(),
    }
    return PairLoss(torch.stack([slope, -slope], dim=1), {name: value.item() for name, value in metrics.items()})


def to_score(token_ids: list[int], weight: float = math.nan) -> TrainSequence:
    """A sequence whose score is the value of what would come next: one token more, of which only the place counts, is all of the loss.
    `weight` of its score in `weighted_values`."""
    length = len(token_ids) + 1
    mask = np.arange(length) == length - 1
    return TrainSequence(
        np.array([*token_ids, 0], np.int32), mask, np.zeros(length, np.float32), np.where(mask, weight, 0.0).astype(np.float32)
    )


def weighted_values(values: Tensor, microbatch: Microbatch) -> LossOutput:
    """The sum of the values [t] with the tokens' advantages as weights."""
    mask = microbatch.loss_mask
    return LossOutput((torch.where(mask, microbatch.advantages, 0.0) * values).sum(), {"tokens": mask.sum()})
