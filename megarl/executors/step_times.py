"""Breaks down the time of a step, on both sides."""

from __future__ import annotations

from megarl.types import Batch
from megarl.weight_sync.sender import SyncReport


def step_times(batch: Batch, step_s: float, train_s: float, batch_wait_s: float, sync: SyncReport, pause_s: float) -> dict[str, float]:
    """The metrics of one step in seconds; docs/asynchrony.md says what each one is.

    The bubble is the time that perfect overlap would have saved: the idle time of the side that idled less.
    """
    trainer_wait_s = batch_wait_s + sync.wait_s
    return {
        "time/step_s": step_s,
        "time/train_s": train_s,
        "time/generate_s": batch.generate_s,
        "time/reward_s": batch.reward_s,
        "time/sync_s": sync.sync_s,
        "time/sync_pause_s": pause_s,
        "time/trainer_wait_s": trainer_wait_s,
        "time/weights_wait_s": sync.wait_s,
        "time/generator_wait_s": batch.generator_wait_s,
        "time/due_wait_s": batch.due_wait_s,
        "time/bubble_s": min(trainer_wait_s + sync.sync_s, batch.generator_wait_s),
    }
