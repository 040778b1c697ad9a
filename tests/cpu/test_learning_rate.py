"""The learning rate of every step, against the schedules' definitions."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from megarl.config.schema import OptimizerConfig
from megarl.trainer.optimizer import LearningRate

PEAK = 2e-3
WARMUP = 4
TOTAL = 20
FLOOR = 0.25
AFTER = {  # share of the peak, by the share of the steps after warm-up that are done
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1 - (1 - FLOOR) * progress,
    "cosine": lambda progress: FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * progress)) / 2,
}


@pytest.mark.parametrize("schedule", AFTER)
def test_rates_are_what_the_schedule_says(schedule):
    optimizer = SimpleNamespace(param_groups=[{}])
    config = OptimizerConfig(lr=PEAK, warmup_steps=WARMUP, schedule=schedule, min_lr_ratio=FLOOR)
    rate = LearningRate(config, optimizer, TOTAL)
    rates = [rate.advance() for _ in range(TOTAL)]
    after = [PEAK * AFTER[schedule](step / (TOTAL - WARMUP)) for step in range(TOTAL - WARMUP + 1)]
    assert rates == pytest.approx([PEAK * step / WARMUP for step in range(1, WARMUP)] + after)
