"""Runs coroutines from code that is not async."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def run_coroutine[T](coroutine: Coroutine[Any, Any, T]) -> T:
    """Like asyncio.run.

    Where an event loop runs already, as in a notebook, it uses a thread, since Python nests no
    loops.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()
