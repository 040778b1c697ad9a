"""What training takes off a response's score: penalties for length. Evaluations and the metric reward/mean are of scores alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megarl.config.schema import RunConfig
from megarl.types import SampleSummary, episodes


def trained_score(score: float, tokens: int, finish_reason: str, config: RunConfig) -> float:
    """What training uses in the place of `score`. A response that was cut loses `reward.unfinished_penalty`, or has
    `reward.unfinished_score`, which may be more than its own. Of the longest allowed response the last `reward.overlong_tokens` cost
    `reward.overlong_penalty` in all, each the same (DAPO, arXiv:2503.14476, equation 13)."""
    reward = config.reward
    if finish_reason == "length":  # never a difference to the fixed score: rounding would prefer one cut response to another
        score = score - reward.unfinished_penalty if reward.unfinished_score is None else reward.unfinished_score
    if not reward.overlong_tokens:
        return score
    beyond = tokens - (config.rollout.max_tokens - reward.overlong_tokens)
    return score - reward.overlong_penalty * max(0, beyond) / reward.overlong_tokens


def trained_reward(branches: Sequence[SampleSummary], config: RunConfig) -> float:
    """Of an episode, all of whose branches have its reward: the most is lost by which any of them is cut or too long."""
    return min(trained_score(sample.reward, sample.tokens, sample.finish_reason, config) for sample in branches)


def has_signal(samples: Sequence[SampleSummary], config: RunConfig) -> bool:
    """Whether the rewards of a prompt's samples, after penalties, are not all the same."""
    return len({trained_reward(branches, config) for branches in episodes(samples)}) > 1


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
