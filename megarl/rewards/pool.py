"""Verification in worker processes, for an asyncio program."""

from __future__ import annotations

import math
import os
import sys

from megarl.config.errors import ConfigError
from megarl.config.schema import RewardConfig
from megarl.rewards.verify import MAX_TEXT_CHARS, VERIFIERS
from megarl.workers.pool import CallFailed, WorkerPool


class RewardPool(WorkerPool):
    """Scores texts in `workers` processes. A text that takes longer than `timeout_s`, or has brought down two workers, scores 0.

    `verifier` is one of VERIFIERS, or a function `package.module:name` of the user's, (text, reference answer) -> number. A ValueError of
    it scores 0; any other mistake of it is told, not scored: a run must not learn from it.
    Use as `async with`, in one event loop. Raises: ConfigError for an unknown verifier or impossible limits.
    """

    def __init__(self, verifier: str = "math", workers: int = 1, timeout_s: float = 5.0, memory_mib: int = 1024):
        if verifier not in VERIFIERS and ":" not in verifier:
            raise ConfigError(f"reward.name={verifier}: must be one of {', '.join(sorted(VERIFIERS))}, package.module:function")
        if workers < 1 or timeout_s <= 0:
            raise ConfigError(f"reward.workers={workers}, reward.timeout_s={timeout_s}: must both be above 0")
        self._verifier, self._most_chars = verifier, MAX_TEXT_CHARS if verifier in VERIFIERS else math.inf
        paths = [os.getcwd(), *filter(None, sys.path)]
        super().__init__("reward", "megarl.rewards.worker", [verifier], workers, timeout_s, memory_mib, paths)

    @classmethod
    async def start(cls, config: RewardConfig) -> RewardPool:
        """A pool at work; to be ended with `close`."""
        return await cls(config.name, config.workers, config.timeout_s, config.memory_mib).__aenter__()

    async def __aenter__(self) -> RewardPool:
        self.open()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def score(self, text: str, answer: str) -> float:
        """Reward of a response text given the reference answer. Raises: RuntimeError if no worker can be started, or the user's function
        makes a mistake."""
        if len(text) > self._most_chars:
            return 0.0
        try:
            reward = await self.call(text, answer)
        except CallFailed:
            return 0.0
        if isinstance(reward, str):
            raise RuntimeError(f"reward.name={self._verifier}: {reward}")
        return reward
