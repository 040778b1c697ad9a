"""Cuts a batch of rollouts into the mini-batches of its optimizer steps."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass
from itertools import accumulate

from megarl.algorithms.base import Algorithm
from megarl.config.schema import TrainerConfig
from megarl.types import Batch


@dataclass(frozen=True)
class MiniBatch:
    """What one optimizer step is made of."""

    places: list[int]  # in the batch, of its samples that are trained on; possibly none
    tokens: int  # of the policy in these
    denominator: float  # the divisor of its summed loss, as if it were a batch: counts also samples that are left out of training


def minibatches(
    batch: Batch, trained: Collection[int], algorithm: Algorithm, trainer: TrainerConfig, seed: int, masked: Collection[int] = ()
) -> list[MiniBatch]:
    """The mini-batches of all epochs, in the order of their optimizer steps. `trained`: the places of samples that are trained on;
    `masked`: of those that count in no mean either.

    A prompt's samples stay together.
    """
    samples, found = batch.samples, []
    starts = [0, *accumulate(len(group.samples) for group in batch.groups)]
    for groups in cut(len(batch.groups), trainer.minibatches, trainer.epochs, seed, batch.step):
        places = [place for group in groups for place in range(starts[group], starts[group + 1]) if place not in masked]
        chosen = [place for place in places if place in trained]
        tokens, used = (sum(samples[place].policy_tokens for place in some) for some in (places, chosen))
        whole = sum(not samples[place].branch for place in places)
        found.append(MiniBatch(chosen, used, algorithm.denominator(tokens, whole) or 1.0))
    return found


def cut(groups: int, count: int, epochs: int, seed: int, step: int) -> list[list[int]]:
    """[epochs * count][groups / count] which groups each mini-batch has; an epoch has every group once.

    An epoch's order depends on its number, `seed` and `step` alone, so it is the same on all ranks, and after a resume.
    """
    assert groups % count == 0, f"{groups} groups, {count} mini-batches"
    found = []
    for epoch in range(epochs):
        order = random.Random(f"{seed}/{step}/{epoch}").sample(range(groups), groups)
        found += [sorted(order[first::count]) for first in range(count)]
    return found
