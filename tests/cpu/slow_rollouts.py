"""Rollouts that leave the machine's cores idle most of the time, for tests of what happens beside a
run.
"""

from __future__ import annotations

import asyncio

from megarl.base.rollout_types import Prompt, Sample
from megarl.generator.completions import Sampling
from megarl.rollouts.environments.base import RolloutContext
from megarl.rollouts.environments.single_turn import single_turn


async def after_a_second(
    context: RolloutContext, prompt: Prompt, sampling: Sampling, n: int
) -> list[Sample]:
    await asyncio.sleep(1)
    return await single_turn(context, prompt, sampling, n)
