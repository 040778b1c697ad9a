"""Episodes that are played from outside, by a program or a hub's environment.

Each episode calls the policy at its own endpoint.
"""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Any, ClassVar

from megarl.agents.endpoint import ModelEndpoint
from megarl.agents.episode import Episode, EpisodeResult, Tree, group_of
from megarl.base.rollout_types import EPISODE, Failure, Group, Prompt
from megarl.config.errors import ConfigError, RunError
from megarl.config.schema import MAX_REWARD
from megarl.data.chat import ChatTemplate
from megarl.data.tokenizer import Tokenizer
from megarl.generator.completions import Sampling
from megarl.generator.tool_parsers import Parser
from megarl.rewards.score import Score, short
from megarl.rollouts.environments.base import RolloutContext

_RECENT = 100  # number of prompts over which `max_unanswered` holds
_MOST_LOGGED = 20  # most failures that are written to the log


@dataclass(eq=False)
class Player(ABC):
    """Plays the n episodes of each prompt.

    An episode that fails gets the reward `on_crash`, and is trained on.

    An episode in which no call of the policy was answered has sampled nothing. It is played again
    up to `retries` times; then its prompt is dropped. The run fails if that happens to more than
    `max_unanswered` of the last 100 prompts.
    """

    rollout: str  # the value of rollout.name
    name: str  # name of the program or environment, for messages
    tokenizer: Tokenizer
    template: ChatTemplate
    parser: Parser
    on_crash: float
    max_calls: int  # most calls of an episode
    retries: int
    at_once: int  # most episodes at once, of all prompts together
    max_unanswered: float

    failures: ClassVar[tuple[str, ...]]  # all kinds of failure; each is a metric

    def __post_init__(self) -> None:
        self._endpoint = ModelEndpoint()
        self._opening = asyncio.Lock()
        self._is_open = False
        self._places = asyncio.Semaphore(self.at_once)
        self._unanswered = deque[bool](maxlen=_RECENT)
        self._unanswered_reason = ""  # of the last prompt that was unanswered
        self._log_count = 0

    async def __call__(
        self, context: RolloutContext, prompt: Prompt, sampling: Sampling, n: int
    ) -> Group:
        """Raises RunError if too many prompts are unanswered or no episode can be played, and the
        error of any failed call of the policy.
        """
        async with self._opening:
            if not self._is_open:
                await self.open()
                self._is_open = True
        played = await self.play(context, prompt, sampling, n)
        self._unanswered.append(not all(tree.turns for tree, _, _ in played))
        if sum(self._unanswered) > self.max_unanswered * _RECENT:
            share = f"{sum(self._unanswered)} of the last {len(self._unanswered)} prompts"
            limit = f"more than rollout.args.max_unanswered={self.max_unanswered:g} of {_RECENT}"
            raise RunError(
                f"{self.name} sampled nothing from the policy for {share}, {limit}; for example "
                f"{self._unanswered_reason}"
            )
        return group_of(prompt, played, self.tokenizer.decode_all)

    async def open(self) -> None:
        """Called before the first prompt."""
        await self._endpoint.open()

    async def close(self) -> None:
        await self._endpoint.close()
        await self.parser.close()

    @abstractmethod
    async def play(
        self, context: RolloutContext, prompt: Prompt, sampling: Sampling, n: int
    ) -> list[EpisodeResult]:
        """The n episodes of a prompt, as `result_of` returns them.

        Episodes that sampled nothing have no turns.
        """

    def episode(self, context: RolloutContext, sampling: Sampling, index: int) -> Episode:
        """The prompt's episode number `index`, from 0 on."""
        sampling = sampling.of_sample(index)
        return Episode(
            context.generate, self.tokenizer, self.template, self.parser, sampling, self.max_calls
        )

    def unanswered(self, prompt: Prompt, episode: Episode, failure: str, errors: str = "") -> str:
        """Notes and returns the reason why an episode has sampled nothing.

        `failure`: the failure of its player.
        """
        reason = episode.unanswered_reason(failure)
        self._unanswered_reason = f"prompt {prompt.ordinal}: {reason}"
        if errors:
            self._unanswered_reason += f"; the end of its errors:\n{errors}"
        return reason

    def result_of(
        self, episode: Episode, score: Score, player_metrics: dict[str, float]
    ) -> EpisodeResult:
        """An episode with its score, or with the substitute from `failure_score`.

        `player_metrics`: the metrics of its player.
        """
        kinds = [failure.kind for failure in score.failures if failure.part == self._part]
        failed = {f"failed_{kind}": float(kind in kinds) for kind in self.failures}
        return EpisodeResult(episode.tree, score, player_metrics | episode.metrics() | failed)

    def failure_score(self, kind: str, reason: str, errors: str = "") -> Score:
        failure = Failure(kind, short(reason, errors), part=self._part)
        return Score(self.on_crash, failures=[failure])

    @property
    def _part(self) -> str:
        return f"{EPISODE}{self.rollout}"

    def log_failure(self, prompt: Prompt, reason: str, errors: str = "") -> None:
        """Writes a failure to the log, up to a limit."""
        self._log_count += 1
        if self._log_count > _MOST_LOGGED:
            return
        message = f"prompt {prompt.ordinal}: {self.name} failed: {reason}"
        if self._log_count == _MOST_LOGGED:
            message += "; further failures are not written, but counted (rollout/failed_…)"
        if errors:
            message += f"\n{errors}"
        print(message, flush=True)


def check_on_crash(on_crash: float) -> None:
    """Raises ConfigError."""
    if not abs(on_crash) <= MAX_REWARD:
        raise ConfigError(
            f"rollout.args.on_crash={on_crash}: must be a finite number of absolute value at most "
            f"{MAX_REWARD:g}"
        )


MOST_METRICS = 32
_METRIC = re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII)


class NoReward(Exception):
    """The expected reward is missing."""


def numbers(report: dict[str, Any], otherwise: str) -> tuple[Score, dict[str, float]]:
    """The reward and the metrics in `report`, a player's report on an episode.

    Raises NoReward with the message `otherwise` if there is no reward or anything else besides.
    """
    values = {}
    for name, value in report.items():
        if type(value) in (int, float) and abs(value) <= MAX_REWARD:
            values[name] = float(value)
    named = len(report) <= MOST_METRICS and all(map(_METRIC.fullmatch, report))
    if "reward" not in values or len(values) < len(report) or not named:
        raise NoReward(otherwise)
    return Score(values.pop("reward")), values


def reward_turns(tree: Tree, rewards: Any, final_reward: float) -> None:
    """Gives each turn its reward: one number for each answered call, in their order.

    `final_reward`: what the last turn of each branch earns besides. Raises NoReward.
    """
    if not isinstance(rewards, list) or len(rewards) != len(tree.turns):
        raise NoReward(
            f"its turn_rewards must be a list of {len(tree.turns)} numbers, one for each answered "
            f"call: {str(rewards)[:200]}"
        )
    for reward in rewards:
        if type(reward) not in (int, float) or not abs(reward) + abs(final_reward) <= MAX_REWARD:
            raise NoReward(
                f"its turn_rewards are not all finite numbers, with the final reward of "
                f"{final_reward:g} at most {MAX_REWARD:g} in size: {str(rewards)[:200]}"
            )
    tree.rewards = dict(zip(tree.turns, map(float, rewards), strict=True))
    tree.final_reward = final_reward
