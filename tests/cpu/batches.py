"""Batches as a trainer rank gets them if it trains on all their samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megarl.base.rollout_types import Batch, Group
from megarl.rollouts.channel import join, pack, split, summary_of


def batch_of(groups: Sequence[Group], step: int = 0, **fields: Any) -> Batch:
    packed = [pack(group) for group in groups]
    summaries = [summary_of(group) for group in packed]
    sizes = [len(group.samples) for group in groups]
    places = range(sum(sizes))
    numbers = split(summaries, places, np.frombuffer(join(packed, sizes, places), np.uint8))
    texts = [group.texts for group in packed]
    return Batch(
        step,
        summaries,
        **{"generate_s": 0.0, "generator_wait_s": 0.0, **fields},
        numbers=numbers,
        texts=texts,
    )
