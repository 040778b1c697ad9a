"""Rewards by the user's own async function, which may await a judge."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any

from megarl.config.schema import RewardConfig
from megarl.rewards.parts import Part, single
from megarl.rewards.pool import RewardMistake
from megarl.rewards.score import Score, ScoreRequest, arguments_of, score_of
from megarl.sandbox.mistakes import own_line

BLOCKED_S = 0.2  # without a turn for anything else of the event loop
WINDOW_S, OFTEN_S = 5.0, 1.0  # so much in so long: many short turns hold it up as well


class RewardInLoop:
    """Calls the function in the event loop, for all responses at once, each for at most `config.timeout_s`. One that holds up the loop
    meanwhile, since it does not await what takes time, is reported (`warn`), again when it has done so for twice as long.

    Failures and mistakes are handled as in RewardPool, but there is no memory limit.
    """

    def __init__(
        self,
        config: RewardConfig,
        function: Callable[..., Awaitable[Any]],
        parameters: Sequence[str],
        part: Part | None = None,
        warn: Callable[[str], None] = lambda text: None,
        now_s: Callable[[], float] = time.monotonic,
    ):
        self._timeout_s, self._function, self._parameters = config.timeout_s, function, parameters
        self._part, self._warn, self._now_s = part or single(config), warn, now_s
        self._blocked_s, self._often_s = BLOCKED_S, OFTEN_S  # from here on it is told
        self._window_began_s, self._held_s = -math.inf, 0.0

    async def score(self, request: ScoreRequest) -> Score:
        """Raises RewardMistake."""
        arguments = dict(zip(self._parameters, arguments_of(request, self._parameters)))
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                found = await _Timed(self._function(**arguments), self._now_s, self._note)
        except ValueError as error:
            return self._part.failed("error", str(error), request)
        except TimeoutError as error:
            if deadline.expired():
                return self._part.failed("timeout", f"it took longer than {self._timeout_s:g} s", request)
            raise RewardMistake(self._part, own_line(error), request) from error
        except Exception as error:
            raise RewardMistake(self._part, own_line(error), request) from error
        try:
            return score_of(found)
        except TypeError as error:
            raise RewardMistake(self._part, str(error), request) from error

    def _note(self, turn_s: float) -> None:
        if turn_s >= self._blocked_s:
            self._blocked_s = 2 * turn_s
            self._tell(f"{turn_s:.1f} s")
        if turn_s >= BLOCKED_S:
            return
        if (now_s := self._now_s()) - self._window_began_s > WINDOW_S:
            self._window_began_s, self._held_s = now_s - turn_s, 0.0
        self._held_s += turn_s
        if self._held_s >= self._often_s:
            self._often_s = 2 * self._held_s
            self._tell(f"{self._held_s:.1f} of {WINDOW_S:g} s")

    def _tell(self, held: str) -> None:
        self._warn(
            f"{self._part.setting}: the async function held up the generator's event loop for {held}, in which no other "
            "response is scored and no engine gets a request: await whatever takes time, or make it a plain function, which runs in "
            "worker processes (reward.workers)"
        )


class _Timed:
    """Awaits `work`, and tells how long each of its turns in the event loop took. What it awaits in tasks of their own does not count."""

    def __init__(self, work: Awaitable[Any], now_s: Callable[[], float], note: Callable[[float], None]):
        self._work, self._now_s, self._note = work, now_s, note

    def __await__(self) -> Generator[Any, Any, Any]:
        work, sent, raised = self._work.__await__(), None, None
        while True:
            began = self._now_s()
            try:
                awaited = work.send(sent) if raised is None else work.throw(raised)  # pyright: ignore
            except StopIteration as ended:
                return ended.value
            finally:
                self._note(self._now_s() - began)
            sent = raised = None
            try:
                sent = yield awaited
            except BaseException as error:  # a cancellation, among others, which is the work's to handle
                raised = error
