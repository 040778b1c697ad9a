"""Waiting inside one event loop for something to become true."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Pulse:
    """Whoever changes what others wait for beats; whoever waits looks again."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def beat(self) -> None:
        self._event.set()  # wakes all that wait now
        self._event.clear()

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._event.wait()
