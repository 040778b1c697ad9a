"""Rewards by the user's own async function, which may await a judge."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from megarl.config.errors import RunError
from megarl.config.schema import RewardConfig
from megarl.rewards.failures import excerpt
from megarl.rewards.pool import mistake
from megarl.rewards.score import Score, ScoreRequest, arguments_of, score_of
from megarl.sandbox.mistakes import own_line
from megarl.types import Failure


class RewardInLoop:
    """Calls the function in the event loop, for all responses at once, each for at most `config.timeout_s`.

    Failures and mistakes are handled as in RewardPool, but there is no memory limit.
    """

    def __init__(self, config: RewardConfig, function: Callable[..., Awaitable[Any]], parameters: Sequence[str]):
        self._config, self._function, self._parameters = config, function, parameters

    async def score(self, request: ScoreRequest) -> Score:
        """Raises RunError if the function makes a mistake."""
        arguments = dict(zip(self._parameters, arguments_of(request, self._parameters)))
        deadline = asyncio.timeout(self._config.timeout_s)
        try:
            async with deadline:
                found = await self._function(**arguments)
        except ValueError as error:
            return self._failed(request, "error", str(error))
        except TimeoutError as error:
            if deadline.expired():
                return self._failed(request, "timeout", f"it took longer than {self._config.timeout_s:g} s")
            raise RunError(mistake(self._config, own_line(error), request)) from error
        except Exception as error:
            raise RunError(mistake(self._config, own_line(error), request)) from error
        try:
            return score_of(found)
        except TypeError as error:
            raise RunError(mistake(self._config, str(error), request)) from error

    def _failed(self, request: ScoreRequest, kind: str, reason: str) -> Score:
        return Score(self._config.failed_score, failure=Failure(kind, reason, excerpt(request.response)))
