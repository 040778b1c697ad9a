"""A rollout whose responses are known before: the prompt's number, and end-of-text."""

from __future__ import annotations

from array import array

from megarl.base.rollout_types import Prompt, Sample
from megarl.generator.completions import Sampling
from megarl.rollouts.environments.base import RolloutContext


async def number(
    context: RolloutContext, prompt: Prompt, sampling: Sampling, n: int
) -> list[Sample]:
    text = str(prompt.ordinal)
    ids = context.tokenizer.encode_response(text)
    zeros = array("f", [0.0]) * len(ids)
    return [Sample(ids, zeros, [0] * len(ids), text, 0.0, "stop")] * n
