"""A rollout of two turns that rewards each of them, for tests of runs."""

from __future__ import annotations

import asyncio

from megarl.base.rollout_types import Prompt, Sample
from megarl.generator.completions import Sampling
from megarl.rollouts.environments.base import RolloutContext, Transcript


async def two_turns(
    context: RolloutContext, prompt: Prompt, sampling: Sampling, n: int
) -> list[Sample]:
    """A turn is rewarded by its number of different tokens; the final reward is 1."""

    async def play(index: int) -> Sample:
        transcript = Transcript(prompt, context.tokenizer, sampling.max_tokens, index)
        for turn in range(2):
            request = transcript.turn(sampling, max_tokens=4)
            [completion] = await context.generate(transcript.token_ids, request, 1)
            transcript.add_policy(completion)
            transcript.add_reward(len(set(completion.token_ids)) / 4)
            if turn == 0:
                transcript.add_environment(context.tokenizer.encode_text(";"))
        return transcript.sample(1.0)

    return await asyncio.gather(*(play(index) for index in range(n)))
