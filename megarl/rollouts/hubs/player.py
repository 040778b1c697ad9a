"""Episodes that an environment in a worker process plays. The policy answers each at an endpoint of its own, as it does programs."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Any

from megarl.data.chat import ChatTemplate
from megarl.data.tokenizer import Tokenizer
from megarl.generator.completions import Sampling
from megarl.generator.tool_parsers import Parser
from megarl.rewards.failures import short
from megarl.rewards.score import Score
from megarl.rollouts.agents.endpoint import MODEL, Endpoint
from megarl.rollouts.agents.episode import Episode
from megarl.rollouts.agents.said import MOST_METRICS, NoReward, numbers
from megarl.rollouts.agents.tree import Played, group_of
from megarl.rollouts.agents.unanswered import Unanswered
from megarl.rollouts.environments.base import RolloutContext
from megarl.rollouts.hubs.worker import NotStarted, Worker, WorkerFailed
from megarl.types import EPISODE, UNANSWERED, Failure, Group, Prompt

_FAILURES = ("environment", "deadline", "reward", "worker", UNANSWERED)
_MOST_TOLD = 20  # failures that are written to the log


@dataclass
class Player:
    """Plays the n episodes of a prompt at once. One that fails has the reward `on_crash`, and is trained on.

    If the worker fails, or an episode has sampled nothing, all n are played again, `retries` times; after that the prompt is dropped if an
    episode has sampled nothing. The run fails if that happens to more than `max_unanswered` of the last 100 prompts, or if the worker
    cannot be started.
    """

    rollout: str  # its name in rollout.name
    name: str  # of the environment, for messages
    tokenizer: Tokenizer
    template: ChatTemplate
    parser: Parser
    worker: Worker
    deadline_s: float
    on_crash: float
    max_calls: int
    retries: int
    at_once: int  # episodes, of all prompts together
    max_unanswered: float
    grace_s: float = 15.0  # in which the worker tells of episodes that it has cut at their deadline
    _endpoint: Endpoint = field(default_factory=Endpoint)
    _opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    _opened: bool = False
    _told: int = 0

    def __post_init__(self) -> None:
        self._places, self._entering = asyncio.Semaphore(self.at_once), asyncio.Lock()
        self._unanswered = Unanswered(self.name, self.max_unanswered)

    async def play(self, context: RolloutContext, prompt: Prompt, sampling: Sampling, n: int) -> Group:
        """Raises RuntimeError if too many prompts are unanswered or there is no worker, and whatever failed a call of the policy."""
        await self._open()
        episodes, told = await self._attempt(context, prompt, sampling, n)
        played = [self._score(prompt, episode, each) for episode, each in zip(episodes, told, strict=True)]
        self._unanswered.count(played)
        return group_of(prompt, played, self.tokenizer.decode_all)

    async def _attempt(
        self, context: RolloutContext, prompt: Prompt, sampling: Sampling, n: int
    ) -> tuple[list[Episode], list[dict[str, Any]]]:
        """The episodes and what is said of each, of the first attempt that does well, or of the last. A row whose first call has no room is
        not tried again."""
        left = self.retries
        while True:
            episodes = [Episode(context.generate, self.tokenizer, self.template, self.parser, sampling, self.max_calls) for _ in range(n)]
            try:
                told, failed = await self._ask(episodes, prompt), False
            except WorkerFailed as failure:
                if isinstance(failure, NotStarted) and not left:
                    raise RuntimeError(f"{self.name} could not be started in {self.retries + 1} attempts: {failure}") from failure
                told, failed = [{"kind": "worker", "error": str(failure)}] * n, True
            silent = [episode for episode in episodes if not episode.tree.turns]
            hopeless = any(episode.counts["out_of_room"] for episode in silent)
            if not left or (not failed and (not silent or hopeless)):
                return episodes, told
            left -= 1

    async def close(self) -> None:
        await self.worker.close()
        await self._endpoint.close()
        await self.parser.close()

    async def _open(self) -> None:
        async with self._opening:
            if not self._opened:
                await self._endpoint.open()
                self._opened = True

    async def _ask(self, episodes: list[Episode], prompt: Prompt) -> list[dict[str, Any]]:
        """What the worker says of each. Raises WorkerFailed, and whatever failed a call."""
        async with contextlib.AsyncExitStack() as context:
            async with self._entering:  # in turn, so that no two wait for places that the other has
                for _ in range(min(len(episodes), self.at_once)):
                    await context.enter_async_context(self._places)
            served = [await context.enter_async_context(self._endpoint.serving(episode, None)) for episode in episodes]
            request = {
                "row": prompt.row,
                "model": MODEL,
                "deadline_s": self.deadline_s,
                "episodes": [{"url": f"http://127.0.0.1:{port}/v1", "key": key} for key, port, *_ in served],
            }
            asking = asyncio.ensure_future(self.worker.ask(request, self.deadline_s + self.grace_s))
            failures = [each.failed for each in served]
            try:
                await asyncio.wait({asking, *failures}, return_when=asyncio.FIRST_COMPLETED)
                for failed in failures:
                    if failed.done():
                        failed.result()
                return (await asking)["episodes"]
            finally:
                asking.cancel()
                await asyncio.wait({asking})

    def _score(self, prompt: Prompt, episode: Episode, told: dict[str, Any]) -> Played:
        kind, why = told.get("kind", ""), told.get("error", "")
        if not episode.tree.turns:
            kind, why = UNANSWERED, episode.why_unanswered(why)
            self._unanswered.why = f"prompt {prompt.ordinal}: {why}"
        score, own = Score(self.on_crash), dict[str, float]()
        if not kind:
            try:
                reward = {"reward": told["reward"], **told["metrics"]}
                form = f"finite numbers, with at most {MOST_METRICS} names"
                score, own = numbers(reward, f"its reward and metrics are not all {form}: {str(reward)[:200]}")
            except NoReward as error:
                kind, why = "reward", str(error)
        if kind:
            self._tell(prompt, why)
            score = Score(self.on_crash, failures=[Failure(kind, short(why), part=f"{EPISODE}{self.rollout}")])
        failures = {f"failed_{each}": float(kind == each) for each in _FAILURES}
        return Played(episode.tree, score, {**own, **episode.metrics(), **failures})

    def _tell(self, prompt: Prompt, why: str) -> None:
        self._told += 1
        if self._told <= _MOST_TOLD:
            more = "; further failures are not written, but counted (rollout/failed_…)" if self._told == _MOST_TOLD else ""
            print(f"prompt {prompt.ordinal}: {self.name} failed: {why}{more}", flush=True)
