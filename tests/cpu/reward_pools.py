"""Pools of reward workers, in the form that the tests call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from megarl.config.schema import RewardConfig
from megarl.rewards import pool as rewards
from megarl.rewards.score import ScoreRequest

DEADLINE_S = 60.0


class RewardPool(rewards.RewardPool):
    """A pool that takes only text and answer."""

    def __init__(self, name: str, log_folder: Path | None = None, **settings: Any):
        super().__init__(RewardConfig(name=name, **settings), ["text", "answer"], log_folder)

    async def rate(self, text: str, answer: str) -> float:
        return (await self.score(ScoreRequest(text, answer))).reward


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), DEADLINE_S))
