"""Rewards computed in worker processes, for an asyncio program."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from megarl.config.errors import RunError
from megarl.config.schema import RewardConfig
from megarl.rewards import ifeval
from megarl.rewards.parts import Part, excerpt, single
from megarl.rewards.score import Score, ScoreRequest, arguments_of
from megarl.rewards.verify import MAX_TEXT_CHARS, VERIFIERS
from megarl.sandbox.pool import CallFailed, WorkerPool

OF_VERIFIERS = ("response", "answer")
CORES_OF_A_WORKER, MOST_WORKERS = 4, 32  # where reward.workers is null
_PASSED = ("HOME", "NLTK_DATA")  # where nltk finds its data


def workers_of(config: RewardConfig) -> int:
    """How many responses are scored at a time. By default few enough of this host's cores for engines and generator to keep theirs."""
    return config.workers or min(MOST_WORKERS, max(1, len(os.sched_getaffinity(0)) // CORES_OF_A_WORKER))


class RewardPool(WorkerPool):
    """Scores responses in `workers_of(config)` processes, by one of VERIFIERS or by the user's function `package.module:name`, which gets
    `parameters` (see rewards.score.parameters_of).

    A call fails if it raises ValueError, takes longer than `config.timeout_s`, runs out of memory, or has brought down two workers; it then
    scores `config.failed_score`, and the score says so. Any other mistake of the function raises, since a run must not learn from it. What
    the function prints goes to `log_folder`/reward.<number>.log. Use as `async with`, in one event loop.
    """

    def __init__(
        self,
        config: RewardConfig,
        parameters: Sequence[str] = OF_VERIFIERS,
        log_folder: Path | None = None,
        part: Part | None = None,
    ):
        """`part` of the reward, if `config.name` is not all of it."""
        self._part, self._parameters = part or single(config), parameters
        name = self._part.name
        self._most_chars = MAX_TEXT_CHARS if name in VERIFIERS else math.inf
        paths = [os.getcwd(), *filter(None, sys.path)]
        arguments = [name, ",".join(parameters)]
        limits = (workers_of(config), config.timeout_s, config.memory_mib)
        own = name not in VERIFIERS  # the launcher has imported it, so here too it may read files and keys
        logged = f"reward:{self._part.part}" if self._part.part else "reward"
        super().__init__(
            logged,
            "megarl.rewards.worker",
            arguments,
            *limits,
            paths,
            log_folder,
            as_here=own,
            passed=_PASSED if name == ifeval.NAME else (),
        )

    async def __aenter__(self) -> RewardPool:
        self.open()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def score(self, request: ScoreRequest) -> Score:
        """Raises RunError if no worker can be started, RewardMistake if the user's function makes a mistake."""
        if len(request.response) > self._most_chars:
            return Score(0.0)
        try:
            reply = await self.call(*arguments_of(request, self._parameters))
        except CallFailed as error:
            return self._part.failed(error.kind, str(error), request)
        if isinstance(reply, str):
            raise RewardMistake(self._part, reply, request)
        return msgspec.convert(reply, Score)


class RewardMistake(RunError):
    """Ends the run after the user's function made a mistake over a response, which `told` says."""

    def __init__(self, part: Part, told: str, request: ScoreRequest):
        self.told = f"{part.setting}: {told}"
        text = excerpt(request.response)
        super().__init__(f"{self.told}\nIt was given the response {text!a}; its output is in the run's logs/reward.*.log")
