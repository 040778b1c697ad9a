"""What training takes off a response's score: penalties for length. Evaluations and the metric reward/mean are of scores alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megarl.config.schema import RunConfig
from megarl.types import SampleSummary


def length_penalty(score: float, tokens: int, finish_reason: str, config: RunConfig) -> float:
    """What is taken off `score`. A response that was cut costs `reward.unfinished_penalty`, or the difference to `reward.unfinished_score`,
    which may be below 0. Of the longest allowed response the last `reward.overlong_tokens` cost `reward.overlong_penalty`
    in all, each the same (DAPO, arXiv:2503.14476, equation 13)."""
    reward = config.reward
    cut = 0.0
    if finish_reason == "length":
        cut = reward.unfinished_penalty if reward.unfinished_score is None else score - reward.unfinished_score
    if not reward.overlong_tokens:
        return cut
    beyond = tokens - (config.rollout.max_tokens - reward.overlong_tokens)
    return cut + reward.overlong_penalty * max(0, beyond) / reward.overlong_tokens


def has_signal(samples: Sequence[SampleSummary], config: RunConfig) -> bool:
    """Whether the rewards of a prompt's samples, after penalties, are not all the same."""
    rewards = {sample.reward - length_penalty(sample.reward, sample.tokens, sample.finish_reason, config) for sample in samples}
    return len(rewards) > 1


def shapes(config: RunConfig) -> bool:
    """Whether there are penalties at all."""
    reward = config.reward
    return reward.unfinished_penalty > 0 or reward.unfinished_score is not None or reward.overlong_tokens > 0


def problems(config: RunConfig) -> Iterable[str]:
    reward, longest = config.reward, config.rollout.max_tokens
    if reward.overlong_tokens > longest:
        yield f"reward.overlong_tokens={reward.overlong_tokens}: must be at most rollout.max_tokens={longest}"
    if reward.unfinished_score is not None and reward.unfinished_penalty:
        taken = f"reward.unfinished_penalty={reward.unfinished_penalty:g}"
        yield f"reward.unfinished_score={reward.unfinished_score:g}: must be null with {taken}"
