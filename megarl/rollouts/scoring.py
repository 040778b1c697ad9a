"""Opens what scores a run's responses: verifiers, functions of the user's own, models of `roles`. Measures how long it is waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from megarl.config.named import is_async
from megarl.config.schema import UNSCORED, RunConfig
from megarl.plan.roles import pairwise
from megarl.rewards import code
from megarl.rewards.in_loop import RewardInLoop
from megarl.rewards.parts import Part, WeightedSum, bounded, weighted_sum
from megarl.rewards.pool import OF_VERIFIERS, RewardPool
from megarl.rewards.score import Score, ScoreRequest
from megarl.roles.judge import Judge
from megarl.roles.opening import Scorer
from megarl.rollouts.environments import loading
from megarl.types import Prompt, Sample

ScoreOne = Callable[[ScoreRequest], Awaitable[Score]]


@dataclass(frozen=True)
class Scoring:
    """`one` scores a response, as soon as it is finished. `comparing` are the parts that need all responses to a prompt."""

    one: ScoreOne
    comparing: Sequence[tuple[Part, Judge]] = ()

    async def compare(self, prompt: Prompt, samples: list[Sample]) -> list[Sample]:
        """The samples with the scores of `comparing` added to their rewards."""
        texts = [sample.text for sample in samples]
        found = await asyncio.gather(*(judge.compare(part, prompt.text, prompt.answer, texts) for part, judge in self.comparing))
        return [self._add(sample, [scores[index] for scores in found]) for index, sample in enumerate(samples)]

    def _add(self, sample: Sample, scores: Sequence[Score]) -> Sample:
        more = weighted_sum([(part, score) for (part, _), score in zip(self.comparing, scores, strict=True)])
        parts = sample.reward_parts | more.parts
        return replace(
            sample,
            reward=bounded(sample.reward + more.reward, parts),
            reward_parts=parts,
            failures=sample.failures + more.failures,
        )


class ScoringClock:
    """How long rollouts have waited for scores, apart from decoding: the integral of the share of the rollouts in flight that do nothing
    else. While all of them do, it runs as fast as the wall's."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic):
        self._now_s, self._waited_s, self._since = now_s, 0.0, now_s()
        self._rollouts = self._waiting = 0

    def waited_s(self) -> float:
        now = self._now_s()
        self._waited_s += (now - self._since) * self._waiting / max(1, self._rollouts)
        self._since = now
        return self._waited_s

    def count(self, rollouts: int = 0, waiting: int = 0) -> None:
        """Adds to the rollouts in flight, and to those of them that wait."""
        self.waited_s()
        self._rollouts += rollouts
        self._waiting += waiting


class RolloutClock:
    """What one rollout does, by `clock`: it waits while responses of it are being scored and none is being decoded."""

    def __init__(self, clock: ScoringClock):
        self._clock, self._decoding, self._scoring = clock, 0, 0

    @contextmanager
    def running(self) -> Iterator[None]:
        self._clock.count(rollouts=1)
        try:
            yield
        finally:
            self._clock.count(rollouts=-1)

    @contextmanager
    def decoding(self) -> Iterator[None]:
        self._change(decoding=1)
        try:
            yield
        finally:
            self._change(decoding=-1)

    @contextmanager
    def scoring(self) -> Iterator[None]:
        self._change(scoring=1)
        try:
            yield
        finally:
            self._change(scoring=-1)

    def _change(self, decoding: int = 0, scoring: int = 0) -> None:
        before = self._waits
        self._decoding += decoding
        self._scoring += scoring
        self._clock.count(waiting=self._waits - before)

    @property
    def _waits(self) -> bool:
        return self._scoring > 0 and not self._decoding


async def open_scoring(
    config: RunConfig,
    parts: Sequence[Part],
    scorers: Mapping[str, Scorer],
    resources: AsyncExitStack,
    logs: Path,
    warn: Callable[[str], None] = lambda text: None,
) -> Scoring:
    """`scorers`: of the roles on engines. `resources` ends the worker processes, which log to the folder `logs`."""
    logs.mkdir(parents=True, exist_ok=True)
    comparing = [(part, scorer) for part in parts if pairwise(config, part) and isinstance(scorer := scorers[part.role or ""], Judge)]
    alone = [part for part in parts if not pairwise(config, part)]
    opened = [(part, await open_part(config, part, scorers, resources, logs, warn)) for part in alone]
    whole = next((score for part, score in opened if not part.part), None)  # without reward.parts there is nothing to add up
    return Scoring(whole or WeightedSum(opened).score, comparing)


async def _unscored(request: ScoreRequest) -> Score:
    return Score(0.0)


async def open_part(
    config: RunConfig,
    part: Part,
    scorers: Mapping[str, Scorer],
    resources: AsyncExitStack,
    logs: Path,
    warn: Callable[[str], None] = lambda text: None,
) -> ScoreOne:
    """What one part of the reward scores a response by."""
    if part.name == UNSCORED:
        return _unscored
    if part.role is not None:
        return partial(scorers[part.role].score, part)
    own = loading.load_reward(part)
    if own is not None and is_async(own.function):
        return RewardInLoop(config.reward, *own, part, warn).score
    if part.name == code.NAME:
        return (await resources.enter_async_context(code.CodeReward(config.reward, part))).score
    pool = RewardPool(config.reward, own.parameters if own else OF_VERIFIERS, logs, part)
    return (await resources.enter_async_context(pool)).score
