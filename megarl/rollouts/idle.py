"""Further samples of a prompt while the generator would be idle (async.idle=samples): sampling them,
and choosing those to train on.

This is the training-bound case of asynchronous RLHF (Noukhovitch et al. 2024, arXiv:2410.18252,
section 4.2). The choice is max-variance down-sampling (Xu et al. 2025, PODS, arXiv:2504.13818).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import numpy as np

from megarl.base.rollout_types import Group, Ordinal, Sample, any_unanswered, episodes
from megarl.messaging.waiting import Pulse


class FurtherSamples:
    """Samples up to `most` episodes of a prompt that has n already, and keeps n of them.

    `sample(ordinal, number)` returns one more episode of the prompt; equal numbers give equal seeds.
    At most n of them run at a time, so a prompt takes no more than its place in flight.
    """

    def __init__(self, sample: Callable[[Ordinal, int], Awaitable[Group]], n: int, most: int):
        self._sample = sample
        self._n = n
        self._most = most

    async def __call__(self, group: Group, is_idle: Callable[[], bool], pulse: Pulse) -> Group:
        """The group with the n most telling of all episodes. Returns once there are `most`, or it
        is no longer idle; episodes that are unfinished then are given up.

        `is_idle` changes with `pulse`. Raises what `sample` raises, and RuntimeError if an episode
        begins with another prompt than the group.
        """
        if any_unanswered(group.samples):
            return group
        further: list[Group] = []
        ordinal = group.prompt.ordinal
        begun = 0
        while is_idle() and self._n + begun < self._most:
            numbers = range(begun, min(begun + self._n, self._most - self._n))
            begun = numbers.stop
            tasks = [asyncio.ensure_future(self._sample(ordinal, number)) for number in numbers]
            further += await _finished(tasks, is_idle, pulse)
        return chosen(group, further, self._n)


async def _finished(
    tasks: Sequence[asyncio.Future[Group]], is_idle: Callable[[], bool], pulse: Pulse
) -> list[Group]:
    """The results of the tasks that end while it is idle. The others are cancelled."""
    busy = asyncio.ensure_future(pulse.until(lambda: not is_idle()))
    pending: set[asyncio.Future] = set(tasks)
    try:
        while pending and not busy.done():
            done, _ = await asyncio.wait({*pending, busy}, return_when=asyncio.FIRST_COMPLETED)
            pending -= done
    finally:
        for task in (*pending, busy):
            task.cancel()
        await asyncio.gather(*pending, busy, return_exceptions=True)
    return [task.result() for task in tasks if not task.cancelled()]


def chosen(group: Group, further: Sequence[Group], n: int) -> Group:
    """The group with the `most_telling` n episodes of all. The rewards of the others are in
    `unsent_rewards`.

    An episode that failed is chosen only if too few others are left: its reward is a substitute.
    """
    candidates: list[list[Sample]] = episodes(group.samples)
    for other in further:
        if other.prompt.token_ids != group.prompt.token_ids:
            raise RuntimeError(
                f"prompt {group.prompt.ordinal}: async.idle=samples needs episodes that begin with "
                "the same tokens; the rollout returned two different prompts"
            )
        if not any_unanswered(other.samples):
            candidates += episodes(other.samples)
    sound = [place for place, branches in enumerate(candidates) if not _has_failed(branches)]
    if len(sound) < n:
        failed = [place for place in range(len(candidates)) if place not in sound]
        sound = sorted(sound + failed[: n - len(sound)])
    rewards = [candidates[place][0].reward for place in sound]
    places = [sound[index] for index in most_telling(rewards, n)]
    unsent = [place for place in range(len(candidates)) if place not in places]
    return msgspec.structs.replace(
        group,
        samples=[sample for place in places for sample in candidates[place]],
        unsent_rewards=[candidates[place][0].reward for place in unsent],
    )


def _has_failed(branches: Sequence[Sample]) -> bool:
    return any(sample.failures for sample in branches)


def most_telling(rewards: Sequence[float], n: int) -> list[int]:
    """The indices, in ascending order, of the n rewards with the largest variance: some of the
    highest and the rest of the lowest (PODS, theorem 1). If all rewards are equal, the first n.
    """
    order = sorted(range(len(rewards)), key=lambda index: rewards[index])
    best = order[:n]
    largest = np.var([rewards[index] for index in best])
    for highest in range(1, n + 1):
        indices = order[: n - highest] + order[len(order) - highest :]
        variance = np.var([rewards[index] for index in indices])
        if variance > largest + 1e-12:
            best = indices
            largest = variance
    return sorted(best)
