"""Helpers for tests of code in an event loop or in other processes."""

from __future__ import annotations

import asyncio

import psutil

DEADLINE_S = 10.0


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def has_ended(process: psutil.Process) -> bool:
    """Whether the process has ended.

    Its parent may reap it at any time, even between two checks here.
    """
    try:
        return process.status() == psutil.STATUS_ZOMBIE or not process.is_running()
    except psutil.NoSuchProcess:
        return True
