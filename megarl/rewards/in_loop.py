"""Rewards by the user's own async function, which may await a judge."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from megarl.config.errors import RunError
from megarl.config.schema import RewardConfig
from megarl.rewards.parts import Part, single
from megarl.rewards.pool import mistake
from megarl.rewards.score import Score, ScoreRequest, arguments_of, score_of
from megarl.sandbox.mistakes import own_line


class RewardInLoop:
    """Calls the function in the event loop, for all responses at once, each for at most `config.timeout_s`.

    Failures and mistakes are handled as in RewardPool, but there is no memory limit.
    """

    def __init__(self, config: RewardConfig, function: Callable[..., Awaitable[Any]], parameters: Sequence[str], part: Part | None = None):
        self._timeout_s, self._function, self._parameters = config.timeout_s, function, parameters
        self._part = part or single(config)

    async def score(self, request: ScoreRequest) -> Score:
        """Raises RunError if the function makes a mistake."""
        arguments = dict(zip(self._parameters, arguments_of(request, self._parameters)))
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                found = await self._function(**arguments)
        except ValueError as error:
            return self._part.failed("error", str(error), request)
        except TimeoutError as error:
            if deadline.expired():
                return self._part.failed("timeout", f"it took longer than {self._timeout_s:g} s", request)
            raise RunError(mistake(self._part, own_line(error), request)) from error
        except Exception as error:
            raise RunError(mistake(self._part, own_line(error), request)) from error
        try:
            return score_of(found)
        except TypeError as error:
            raise RunError(mistake(self._part, str(error), request)) from error
