"""A rollout: prompt in, scored samples out. A small async function that many run at once."""

from __future__ import annotations

from typing import Protocol

from megarl.data.tokenizer import Tokenizer
from megarl.generator.client import Sampling
from megarl.generator.fleet import Fleet
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
