"""For tests of what runs in an event loop."""

from __future__ import annotations

import asyncio

DEADLINE_S = 10.0


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
