"""Rewards computed in worker processes, for an asyncio program."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from megarl.base.cores import usable_cores
from megarl.config.errors import RunError
from megarl.config.schema import RewardConfig
from megarl.rewards import ifeval
from megarl.rewards.extract import MAX_TEXT_CHARS, final_part, thinking_in
from megarl.rewards.score import (
    RewardPart,
    Score,
    ScoreRequest,
    arguments_of,
    excerpt,
    score_of,
    single,
)
from megarl.rewards.verify import VERIFIERS
from megarl.sandbox.pool import CallFailed, WorkerPool
from megarl.sandbox.process import own_line

OF_VERIFIERS = ("response", "answer")
CORES_OF_A_WORKER = 4
MOST_WORKERS = 32  # used if reward.workers is null
_TIMEOUT_NOTE = " (reward.timeout_s)"
_PASSED = ("HOME", "NLTK_DATA")  # where nltk finds its data


def workers_of(config: RewardConfig) -> int:
    """How many responses are scored at a time.

    By default it leaves most of this host's cores to engines and generator.
    """
    return config.workers or min(MOST_WORKERS, max(1, usable_cores() // CORES_OF_A_WORKER))


class RewardPool(WorkerPool):
    """Scores responses in `workers_of(config)` processes.

    The scorer is one of VERIFIERS, or the user's function `package.module:name`, which gets the
    fields `parameters` (see rewards.score.parameters_of).

    A call fails if it raises ValueError, takes longer than `config.timeout_s`, runs out of memory,
    or has ended two workers. The response then scores `config.failed_score`, and its Score records
    the failure. Any other exception is a mistake in the function and is raised, since a run must
    not learn from it. Output of the function goes to `log_folder`/reward.<number>.log. Use as
    `async with`, in one event loop.
    """

    def __init__(
        self,
        config: RewardConfig,
        parameters: Sequence[str] = OF_VERIFIERS,
        log_folder: Path | None = None,
        part: RewardPart | None = None,
    ):
        """`part`: the part of the reward to score; by default `config.name` is the whole reward."""
        self._part = part or single(config)
        self._parameters = parameters
        name = self._part.name
        self._of_final_part = name in VERIFIERS and name != ifeval.NAME
        self._most_chars = MAX_TEXT_CHARS if name in VERIFIERS else math.inf
        paths = [os.getcwd(), *filter(None, sys.path)]
        arguments = [name, ",".join(parameters)]
        memory = f"reward.memory_mib={config.memory_mib}"
        self._limit_notes = {
            "timeout": _TIMEOUT_NOTE,
            "memory": f" ({memory})",
            "exit": f"; {memory} may be too little",
        }
        # the launcher has already imported it, so reading files and keys is no new risk here
        runs_user_code = name not in VERIFIERS
        logged = f"reward:{self._part.part}" if self._part.part else "reward"
        super().__init__(
            logged,
            "megarl.rewards.worker",
            arguments,
            workers_of(config),
            config.timeout_s,
            config.memory_mib,
            paths,
            log_folder,
            as_here=runs_user_code,
            passed=_PASSED if name == ifeval.NAME else (),
        )

    async def __aenter__(self) -> RewardPool:
        self.open()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def score(self, request: ScoreRequest) -> Score:
        """Raises RunError if no worker can be started, RewardMistake if the user's function makes a
        mistake.
        """
        judged = request
        if self._of_final_part:
            judged = msgspec.structs.replace(
                request, response=final_part(thinking_in(request.prompt) + request.response)
            )
        if len(judged.response) > self._most_chars:
            return self._part.failed(
                "error", f"the response has more than {MAX_TEXT_CHARS} characters", request
            )
        try:
            reply = await self.call(*arguments_of(judged, self._parameters))
        except CallFailed as error:
            return self._part.failed(
                error.kind, f"{error}{self._limit_notes.get(error.kind, '')}", request
            )
        if isinstance(reply, str):
            raise RewardMistake(self._part, reply, request)
        return msgspec.convert(reply, Score)


class RewardMistake(RunError):
    """Ends the run because of a mistake in the user's function, which `description` describes."""

    def __init__(self, part: RewardPart, description: str, request: ScoreRequest):
        self.description = f"{part.setting}: {description}"
        text = excerpt(request.response)
        super().__init__(
            f"{self.description}\nIt was given the response {text!a}; its output is in the run's "
            "logs/reward.*.log"
        )


BLOCKED_S = 0.2  # seconds in which nothing else in the event loop got a turn
WINDOW_S = 5.0
OFTEN_S = 1.0  # blocking for OFTEN_S within WINDOW_S counts too, in many short turns


class RewardInLoop:
    """Calls the user's own async function, which may await a judge, in the event loop.

    It does so for all responses at once, each for at most `config.timeout_s`. If the function
    blocks the loop, `warn` reports it. The next report follows once it has blocked the loop for
    twice as long.

    Failures and mistakes are handled as in RewardPool, but there is no memory limit.
    """

    def __init__(
        self,
        config: RewardConfig,
        function: Callable[..., Awaitable[Any]],
        parameters: Sequence[str],
        part: RewardPart | None = None,
        warn: Callable[[str], None] = lambda text: None,
        now_s: Callable[[], float] = time.monotonic,
    ):
        self._timeout_s = config.timeout_s
        self._function = function
        self._parameters = parameters
        self._part = part or single(config)
        self._warn = warn
        self._now_s = now_s
        self._blocked_s = BLOCKED_S
        self._often_s = OFTEN_S  # thresholds of the next warning
        self._window_began_s = -math.inf
        self._blocking_s = 0.0

    async def score(self, request: ScoreRequest) -> Score:
        """Raises RewardMistake."""
        arguments = dict(zip(self._parameters, arguments_of(request, self._parameters)))
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                result = await _Timed(self._function(**arguments), self._now_s, self._note)
        except ValueError as error:
            return self._part.failed("error", str(error), request)
        except TimeoutError as error:
            if deadline.expired():
                return self._part.failed(
                    "timeout", f"it took longer than {self._timeout_s:g} s{_TIMEOUT_NOTE}", request
                )
            raise RewardMistake(self._part, own_line(error), request) from error
        except Exception as error:
            raise RewardMistake(self._part, own_line(error), request) from error
        try:
            return score_of(result)
        except TypeError as error:
            raise RewardMistake(self._part, str(error), request) from error

    def _note(self, turn_s: float) -> None:
        if turn_s >= self._blocked_s:
            self._blocked_s = 2 * turn_s
            self._tell(f"{turn_s:.1f} s")
        if turn_s >= BLOCKED_S:
            return
        now_s = self._now_s()
        if now_s - self._window_began_s > WINDOW_S:
            self._window_began_s = now_s - turn_s
            self._blocking_s = 0.0
        self._blocking_s += turn_s
        if self._blocking_s >= self._often_s:
            self._often_s = 2 * self._blocking_s
            self._tell(f"{self._blocking_s:.1f} of {WINDOW_S:g} s")

    def _tell(self, duration: str) -> None:
        self._warn(
            f"{self._part.setting}: the async function blocked the generator's event loop for "
            f"{duration}. Meanwhile no other response is "
            "scored and no engine gets a request. Await whatever takes time, or make it a plain "
            "function, which runs in worker processes "
            "(reward.workers)"
        )


class _Timed:
    """Awaits `work`, and reports how long each of its turns in the event loop took.

    Tasks that it awaits do not count.
    """

    def __init__(
        self, work: Awaitable[Any], now_s: Callable[[], float], note: Callable[[float], None]
    ):
        self._work = work
        self._now_s = now_s
        self._note = note

    def __await__(self) -> Generator[Any, Any, Any]:
        work = self._work.__await__()
        sent = None
        raised = None
        while True:
            start_s = self._now_s()
            try:
                awaited = work.send(sent) if raised is None else work.throw(raised)  # pyright: ignore
            except StopIteration as ended:
                return ended.value
            finally:
                self._note(self._now_s() - start_s)
            sent = None
            raised = None
            try:
                sent = yield awaited
            except BaseException as error:  # such as a cancellation, which `work` must handle
                raised = error
