"""Waiting within one event loop for a condition."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Pulse:
    """A task that changes what others may wait for calls `beat`; waiting tasks then check their condition again."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def beat(self) -> None:
        self._event.set()  # wakes all waiting tasks
        self._event.clear()

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._event.wait()
