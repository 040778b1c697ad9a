"""Waiting within one event loop, and tasks that run beside an executor's work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar


class Pulse:
    """Lets tasks wait for a condition.

    A task that changes it calls `beat`, and all waiting tasks check their condition again.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def beat(self) -> None:
        self._event.set()  # wakes all waiting tasks
        self._event.clear()

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._event.wait()


T = TypeVar("T")


class Background:
    """Tasks of one event loop. The error of the first task that fails also ends the coroutine that
    runs `beside` them.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task] = set()
        self._failure: asyncio.Future | None = None

    def start(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def beside(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs `coroutine` to its end.

        Raises its error or the error of a background task, even an earlier one. Then all tasks are
        cancelled, so that only that error is reported.
        """
        self._failure = self._failure or asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(coroutine)
        try:
            await asyncio.wait({task, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            return self._failure.result() if self._failure.done() else task.result()
        except BaseException:
            await _cancelled({task})
            await self.close()
            raise

    async def close(self) -> None:
        await _cancelled(set(self._tasks))

    def _ended(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        self._failure = self._failure or task.get_loop().create_future()
        if not self._failure.done():  # the first error is closest to the cause
            error.add_note(f"in the background task: {task.get_name()}")
            self._failure.set_exception(error)


async def _cancelled(tasks: set[asyncio.Task]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
