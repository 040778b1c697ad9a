"""What a reward is made of: one score, or the weighted sum of several."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from megarl.config.errors import RunError
from megarl.config.schema import GRADERS, MAX_REWARD, RewardConfig, RunConfig
from megarl.rewards.score import Score, ScoreRequest
from megarl.types import Failure

ROLE = "roles."  # begins the name of a score that a model of `roles` gives
_EXAMPLE_CHARS = 200


@dataclass(frozen=True)
class Part:
    """One score of a response. `part` is its name in reward.parts; empty if it is all of the reward."""

    name: str  # as reward.name
    failed_score: float
    part: str = ""
    weight: float = 1.0
    key: str = "reward.name"

    @property
    def setting(self) -> str:
        return f"{self.key}={self.name}"

    @property
    def role(self) -> str | None:
        """The role whose model gives the score; None if a rule does."""
        return self.name.removeprefix(ROLE) if self.name.startswith(ROLE) else None

    def failed(self, kind: str, reason: str, request: ScoreRequest) -> Score:
        """The score of a response that could not be scored."""
        return Score(self.failed_score, failures=[Failure(kind, reason, excerpt(request.response), self.part)])


def single(config: RewardConfig) -> Part:
    return Part(config.name, config.failed_score)


def parts_of(config: RewardConfig) -> list[Part]:
    """The parts of the reward: those of reward.parts, or reward.name alone."""
    found = [
        Part(
            own.name,
            config.failed_score if own.failed_score is None else own.failed_score,
            part,
            own.weight,
            f"reward.parts.{part}.name",
        )
        for part, own in config.parts.items()
        if own is not None
    ]
    return found or [single(config)]


def parts_in_evaluation(config: RunConfig, suite: str = "") -> list[Part]:
    """The parts of what scores held-out responses: to a benchmark's prompts its own, to all others the same."""
    if (own := config.eval.suites.get(suite)) and own.benchmark:
        return [Part(GRADERS[own.benchmark], 0.0, key=f"eval.suites.{suite}.benchmark={own.benchmark}, graded by reward.name")]
    if config.eval.reward is None:
        return parts_of(config.reward)
    return [Part(config.eval.reward, config.reward.failed_score, key="eval.reward")]


def all_parts(config: RunConfig) -> list[Part]:
    """Those of training and of all evaluations."""
    benchmarks = [name for name, suite in config.eval.suites.items() if suite and suite.benchmark]
    evaluated = [part for name in ("", *benchmarks) for part in parts_in_evaluation(config, name)]
    return [*parts_of(config.reward), *evaluated]


@dataclass(frozen=True)
class WeightedSum:
    """Scores a response by all parts at once."""

    parts: Sequence[tuple[Part, Callable[[ScoreRequest], Awaitable[Score]]]]

    async def score(self, request: ScoreRequest) -> Score:
        scores = await asyncio.gather(*(score(request) for _, score in self.parts))
        return weighted_sum([(part, score) for (part, _), score in zip(self.parts, scores, strict=True)])


def weighted_sum(scored: Sequence[tuple[Part, Score]]) -> Score:
    """Each part's own parts come below its name; one without a name is all of the reward."""
    named = {part.part: score.reward for part, score in scored if part.part}
    inner = {f"{part.part}/{name}".lstrip("/"): value for part, score in scored for name, value in score.parts.items()}
    failures = [failure for _, score in scored for failure in score.failures]
    return Score(bounded(sum(part.weight * score.reward for part, score in scored), named), named | inner, failures)


def bounded(reward: float, parts: Mapping[str, float]) -> float:
    """The weighted sum of `parts`. Raises RunError if it is larger than a reward may be."""
    if abs(reward) > MAX_REWARD:
        scores = ", ".join(f"{name} {score:g}" for name, score in parts.items())
        raise RunError(f"reward.parts: the weighted sum of {scores} is {reward:g}, more than {MAX_REWARD:g} in size: lower the weights")
    return reward


def excerpt(response: str) -> str:
    """The beginning of a response, to be shown in an error."""
    return response if len(response) <= _EXAMPLE_CHARS else response[:_EXAMPLE_CHARS] + "…"
