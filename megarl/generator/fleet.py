"""The engines of a run as one: every request goes to the engine with the fewest in flight."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Sequence

from megarl.generator.client import Completion, EngineClient, Sampling


class Fleet:
    """`engines` are clients of servers that all hold the same weights."""

    def __init__(self, engines: Sequence[EngineClient]):
        self.engines = list(engines)
        self._in_flight: Counter[int] = Counter()

    async def generate(self, prompt_ids: list[int], sampling: Sampling, n: int) -> list[Completion]:
        """n completions of one prompt, from one engine, so that they share the prompt's KV cache."""
        index = min(range(len(self.engines)), key=lambda i: self._in_flight[i])
        self._in_flight[index] += n
        try:
            return await self.engines[index].generate(prompt_ids, sampling, n)
        finally:
            self._in_flight[index] -= n

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self.engines))
