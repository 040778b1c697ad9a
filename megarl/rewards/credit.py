"""What each turn of a response has earned, and which turns are compared with each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from megarl.base.rollout_types import GroupSummary, Sample, SampleSummary, TurnReward, episodes
from megarl.config.algorithms import OUTCOME, PROCESS
from megarl.config.schema import AlgorithmConfig, RunConfig
from megarl.config.tasks import task_of
from megarl.rewards.score import trained_reward

_ROUNDING = 1e-9  # relative difference below which turns have earned what the response has


class ComparedTurn(NamedTuple):
    """A turn that is learned, and the value that it is compared by."""

    sample: int  # its place among the samples of the prompt
    number: int  # its place among the turns of the sample
    value: float


def trained_turns(samples: Sequence[SampleSummary], config: RunConfig) -> list[list[TurnReward]]:
    """For each of a prompt's samples, what its turns have earned after penalties, which the last
    turn bears.
    """
    turns_of_samples = []
    for branches in episodes(samples):
        trained = trained_reward(branches, config)
        for sample in branches:
            *turns, (end, reward) = sample.turns_or_one
            if reward == sample.reward:
                earned = trained  # exactly, since rounding would prefer one response to another
            else:
                earned = reward + (trained - sample.reward)
            turns_of_samples.append([*turns, TurnReward(end, earned)])
    return turns_of_samples


def compared_turns(samples: Sequence[SampleSummary], config: RunConfig) -> list[list[ComparedTurn]]:
    """The sets of a prompt's turns that are compared with each other, each in the samples' order.

    With credit=returns, the turns with the same number k, by their returns: the sum over the turn
    and all later ones j of turn_gamma^(j - k) times their rewards. With credit=process, all turns,
    by their rewards. A turn that several branches share counts once, in the first of them.
    """
    credit = config.algorithm.credit
    sets: dict[int, list[ComparedTurn]] = {}
    for place, turns in enumerate(trained_turns(samples, config)):
        values = [turn.reward for turn in turns]
        if credit != PROCESS:
            values = returns(values, turn_gamma(config.algorithm))
        for number in range(samples[place].shared_turns, len(turns)):
            compared_set = sets.setdefault(0 if credit == PROCESS else number, [])
            compared_set.append(ComparedTurn(place, number, values[number]))
    return list(sets.values())


def turn_gamma(config: AlgorithmConfig) -> float:
    return 1.0 if config.turn_gamma is None else config.turn_gamma


def returns(rewards: Sequence[float], gamma: float) -> list[float]:
    """The sum of each reward and all later ones, discounted by `gamma` a turn."""
    results = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + gamma * following
        results.append(following)
    return results[::-1]


def has_signal(samples: Sequence[SampleSummary], config: RunConfig) -> bool:
    """Whether the rewards of a prompt's samples, after penalties, are not all the same; with credit
    by turn, those of turns that are compared. `config`: the task of the prompt's source.
    """
    if config.algorithm.credit == OUTCOME:
        return len({trained_reward(branches, config) for branches in episodes(samples)}) > 1
    sets = compared_turns(samples, config)
    return any(len({turn.value for turn in compared_set}) > 1 for compared_set in sets)


def fraction_without_signal(groups: Sequence[GroupSummary], config: RunConfig) -> float:
    """The share of groups without signal, by the tasks of their sources."""
    return fmean(not has_signal(group.samples, task_of(config, group.source)) for group in groups)


def has_own_turns(sample: Sample | SampleSummary) -> bool:
    """Whether turns have earned something else than the response's reward at its end."""
    rewards = [turn.reward for turn in sample.turn_rewards]
    return bool(rewards) and (any(rewards[:-1]) or rewards[-1] != sample.reward)


def ignores_turns(sample: Sample | SampleSummary) -> bool:
    """Whether the sum of what turns have earned is not the reward, which alone counts with
    credit=outcome.
    """
    if not has_own_turns(sample):
        return False
    earned = math.fsum(turn.reward for turn in sample.turn_rewards)
    return not math.isclose(earned, sample.reward, rel_tol=_ROUNDING, abs_tol=_ROUNDING)


def turn_metrics(samples: Sequence[SampleSummary], config: RunConfig) -> dict[str, float]:
    """The mean reward of a turn and of all turns of a sample, over the samples that have rewards at
    turns. reward/turns/ignored_fraction: the share of samples whose rewards at turns do not count.
    """
    rewarded = [sample for sample in samples if has_own_turns(sample)]
    if not rewarded:
        return {}
    rewards = [turn.reward for sample in rewarded for turn in sample.turns_or_one]
    metrics = {
        "reward/turns/mean": math.fsum(rewards) / len(rewards),
        "reward/turns/sum": math.fsum(rewards) / len(rewarded),
    }
    if config.algorithm.credit == OUTCOME:
        count = sum(ignores_turns(sample) for sample in rewarded)
        metrics["reward/turns/ignored_fraction"] = count / len(samples)
    return metrics
