"""A rollout: prompt in, scored samples out. A small async function that many run at once."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Protocol

from megarl.data.tokenizer import Tokenizer
from megarl.generator.client import EngineClient, Sampling
from megarl.generator.fleet import Fleet
from megarl.launch.rendezvous import Rendezvous
from megarl.plan.resolve import RunPlan
from megarl.rewards.pool import RewardPool
from megarl.types import Group, Prompt, Sample


class Rollout(Protocol):
    async def __call__(self, prompt: Prompt, sampling: Sampling, n: int) -> Group: ...


class SingleTurn:
    """One completion per sample, scored against the prompt's reference answer."""

    def __init__(self, fleet: Fleet, tokenizer: Tokenizer, rewards: RewardPool):
        self._fleet, self._tokenizer, self._rewards = fleet, tokenizer, rewards

    async def __call__(self, prompt: Prompt, sampling: Sampling, n: int) -> Group:
        completions = await self._fleet.generate(prompt.token_ids, sampling, n)
        texts = [self._tokenizer.decode(completion.token_ids) for completion in completions]
        rewards = await self._rewards.score_many([(text, prompt.answer) for text in texts])
        samples = [
            Sample(
                token_ids=completion.token_ids,
                logprobs=completion.logprobs,
                versions=completion.versions,
                text=text,
                reward=reward,
                finish_reason=completion.finish_reason,
            )
            for completion, text, reward in zip(completions, texts, rewards, strict=True)
        ]
        return Group(prompt=prompt, samples=samples)


async def open_fleet(plan: RunPlan, rendezvous: Rendezvous, resources: AsyncExitStack) -> Fleet:
    """Clients of all engines, once each takes requests; closed with `resources`."""
    config = plan.config
    urls = rendezvous.engine_urls
    engines = [EngineClient(url, rendezvous.engine_key, rendezvous.engine_admin_key, config.timeouts.request_s) for url in urls]
    chunk_tokens = config.async_.chunk_tokens or max(1, config.rollout.max_tokens // 4)
    mode = config.async_.partial_rollout
    fleet = Fleet(engines, mode, chunk_tokens if mode == "resume" else None)
    resources.push_async_callback(fleet.close)
    await asyncio.gather(*(engine.wait_ready(config.generator.startup_timeout_s) for engine in engines))
    return fleet


async def open_rollout(plan: RunPlan, fleet: Fleet, tokenizer: Tokenizer, resources: AsyncExitStack) -> Rollout:
    """The rollout of a run, with its reward workers, which end with `resources`."""
    rewards = await RewardPool.start(plan.config.reward)
    resources.push_async_callback(rewards.close)
    return SingleTurn(fleet, tokenizer, rewards)


def train_sampling(plan: RunPlan, tokenizer: Tokenizer) -> Sampling:
    rollout = plan.config.rollout
    return Sampling(rollout.max_tokens, rollout.temperature, rollout.top_p, rollout.top_k, tokenizer.eos_ids)


def eval_sampling(plan: RunPlan, tokenizer: Tokenizer) -> Sampling:
    """Greedy."""
    return Sampling(plan.config.eval.max_tokens or plan.config.rollout.max_tokens, temperature=0.0, stop_token_ids=tokenizer.eos_ids)
