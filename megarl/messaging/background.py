"""Tasks that go on beside what an executor does."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    """The first task that dies fails whatever is being done at the time, with its own error. Inside one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task] = set()
        self._failure: asyncio.Future | None = None

    def start(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def beside(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs `coroutine` to its end. Raises what it raises, or what a task raises or has raised; then all tasks are ended too,
        so that nothing but the error is heard of them."""
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
        if task.cancelled() or (error := task.exception()) is None:
            return
        self._failure = self._failure or task.get_loop().create_future()
        if not self._failure.done():  # the first is the cause, or nearest to it
            error.add_note(f"in the background task: {task.get_name()}")
            self._failure.set_exception(error)


async def _cancelled(tasks: set[asyncio.Task]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
