"""Rollouts whose held-out prompts wait at a gate, for tests of what evaluations delay."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from megarl.base.rollout_types import Prompt, Sample
from megarl.generator.completions import Sampling
from megarl.rollouts.environments.base import RolloutContext
from megarl.rollouts.environments.single_turn import single_turn

# environment variable with a file's path; while the file exists, no held-out prompt is answered
GATE = "GATED_ROLLOUTS_GATE"
DEADLINE_S = 200


async def held_out_waits(
    context: RolloutContext, prompt: Prompt, sampling: Sampling, n: int
) -> list[Sample]:
    """Held-out prompts wait while the gate is closed.

    Training prompts are slow, so that the run lasts long enough for the test.
    """
    gate = Path(os.environ[GATE])
    deadline = time.monotonic() + DEADLINE_S
    if sampling.temperature > 0:
        await asyncio.sleep(0.5)
    while sampling.temperature == 0 and gate.exists():
        assert time.monotonic() < deadline, f"{gate} is still there"
        await asyncio.sleep(0.01)
    return await single_turn(context, prompt, sampling, n)
