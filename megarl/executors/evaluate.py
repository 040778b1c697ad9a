"""Held-out evaluation: greedy pass@1 through SGLang."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Sequence

from megarl.data.prompts import eval_prompts
from megarl.data.tokenizer import load_tokenizer
from megarl.executors.rollout import Rollout, eval_sampling, open_fleet, open_rollout
from megarl.generator.completions import Sampling
from megarl.launch.rendezvous import Rendezvous
from megarl.plan.resolve import RunPlan
from megarl.types import Group, Prompt


async def pass_at_1(rollout: Rollout, prompts: Sequence[Prompt], sampling: Sampling, at_once: int) -> dict[str, float]:
    """Share of prompts whose one greedy answer gets the full reward. No more than `at_once` are under way: the deadline of a rollout
    counts from its beginning, and what waits for a place in an engine would wait at its expense."""
    started, places = time.monotonic(), asyncio.Semaphore(at_once)

    async def answer(prompt: Prompt) -> Group:
        async with places:
            return await rollout(prompt, sampling, 1)

    groups = await asyncio.gather(*map(answer, prompts))
    correct = sum(group.samples[0].reward >= 1.0 for group in groups)
    return {"pass@1": correct / len(prompts), "correct": correct, "prompts": len(prompts), "seconds": time.monotonic() - started}


async def evaluate_engines(plan: RunPlan, rendezvous: Rendezvous) -> dict[str, float]:
    """pass@1 of `data.eval` under the weights that the engines were started with."""
    tokenizer = load_tokenizer(plan.config.model)
    async with AsyncExitStack() as resources:
        fleet = await open_fleet(plan, rendezvous, resources)
        rollout = await open_rollout(plan, fleet, tokenizer, resources)
        return await pass_at_1(rollout, eval_prompts(plan.config, tokenizer), eval_sampling(plan, tokenizer), places(plan))


def places(plan: RunPlan) -> int:
    """How many requests all engines together work on at once."""
    return plan.config.generator.engines * plan.config.generator.max_concurrency
