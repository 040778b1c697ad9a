"""One completion per sample, scored against the prompt's reference answer."""

from __future__ import annotations

import asyncio

from megarl.base.rollout_types import Prompt, Sample
from megarl.generator.completions import Completion, Sampling
from megarl.rollouts.environments.base import RolloutContext, Transcript


async def single_turn(
    context: RolloutContext, prompt: Prompt, sampling: Sampling, n: int
) -> list[Sample]:
    """Asks for all n completions in one request, so that they share the prompt's KV cache."""

    async def scored(index: int, completion: Completion) -> Sample:
        transcript = Transcript(prompt, context.tokenizer, sampling.max_tokens, index)
        transcript.add_policy(completion)
        return transcript.sample(await context.score(transcript.to_score))

    completions = await context.generate(prompt.token_ids, sampling, n)
    return await asyncio.gather(
        *(scored(index, completion) for index, completion in enumerate(completions))
    )
