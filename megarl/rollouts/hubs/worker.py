"""A process of another interpreter that plays episodes: a JSON object a line goes in, and one comes out for each, in any order."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import resource
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

_MOST_LINE_BYTES = 1 << 26  # what the worker says of each episode has at most 1 << 15
_TAIL_BYTES = 4096
_NO_LIMIT_BYTES = 1 << 62  # more than a machine has, and what setrlimit takes
_EXIT_S = 5.0  # from its last line to its exit


class WorkerFailed(Exception):
    """The process has ended or was ended; what it was asked is not answered. The message has the end of its standard error."""


class NotStarted(WorkerFailed):
    """The process has ended before it was ready."""


@dataclass
class _Process:
    running: asyncio.subprocess.Process
    waiting: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)
    errors: bytearray = field(default_factory=bytearray)  # the end of its standard error
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    gone: str = ""  # why, once it has
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    ending: asyncio.Task[None] | None = None


@dataclass
class Worker:
    """Starts its process when it is first asked, and again when asked after it has ended."""

    command: Sequence[str]
    variables: dict[str, str]  # its whole environment
    memory_mib: int  # of its data
    start_s: float  # until it says that it is ready
    _process: _Process | None = None
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def ask(self, request: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        """Ends the process if it has not answered in time: nothing else stops code that never awaits. Raises WorkerFailed."""
        process, number = await self._started(), next(self._numbers)
        answer = process.waiting[number] = asyncio.get_running_loop().create_future()
        try:
            assert process.running.stdin is not None
            process.running.stdin.write(json.dumps({"id": number, **request}).encode() + b"\n")
            async with asyncio.timeout(deadline_s):
                return await answer
        except TimeoutError:
            await self._end(process, f"it did not answer within {deadline_s:g} s")
            raise WorkerFailed(process.gone) from None
        finally:
            process.waiting.pop(number, None)

    async def close(self) -> None:
        if self._process is not None:
            await self._end(self._process, "it is no longer needed")

    async def _started(self) -> _Process:
        async with self._starting:
            if self._process is None or self._process.ending:
                self._process = await self._start()
            return self._process

    async def _start(self) -> _Process:
        running = await asyncio.create_subprocess_exec(
            *self.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd="/",
            env=self.variables,
            start_new_session=True,
            limit=_MOST_LINE_BYTES,
        )
        self._limit(running.pid)
        process = _Process(running)
        process.tasks = [
            asyncio.create_task(self._keep_errors(process), name="what a worker prints"),
            asyncio.create_task(self._read(process), name="answers of a worker"),
        ]
        try:
            async with asyncio.timeout(self.start_s):
                await process.ready.wait()
        except TimeoutError:
            await self._end(process, f"it was not ready within {self.start_s:g} s")
        except asyncio.CancelledError:
            await self._end(process, "it is no longer needed")
            raise
        if process.gone:
            raise NotStarted(process.gone)
        return process

    def _limit(self, pid: int) -> None:
        """From outside, since code between fork and exec would fork a process in which threads encode texts."""
        _, most_bytes = resource.getrlimit(resource.RLIMIT_DATA)
        limit_bytes = min(self.memory_mib << 20, _NO_LIMIT_BYTES if most_bytes == resource.RLIM_INFINITY else most_bytes)
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            resource.prlimit(pid, resource.RLIMIT_DATA, (limit_bytes, limit_bytes))

    async def _read(self, process: _Process) -> None:
        """Until it ends, or writes what it must not."""
        assert process.running.stdout is not None
        why = ""
        try:
            while line := await process.running.stdout.readline():
                told = json.loads(line)
                if "ready" in told:
                    process.ready.set()
                elif (waiting := process.waiting.get(told["id"])) is not None and not waiting.done():
                    waiting.set_result(told)
        except (ValueError, LookupError, TypeError) as error:
            why = f"it wrote what cannot be read: {error!r}"[:500]
        self._begin_end(process, why)

    async def _keep_errors(self, process: _Process) -> None:
        assert process.running.stderr is not None
        while data := await process.running.stderr.read(1 << 16):
            process.errors += data
            del process.errors[:-_TAIL_BYTES]

    def _begin_end(self, process: _Process, why: str) -> asyncio.Task[None]:
        process.ending = process.ending or asyncio.create_task(self._kill(process, why), name="end of a worker")
        return process.ending

    async def _end(self, process: _Process, why: str) -> None:
        await asyncio.shield(self._begin_end(process, why))

    async def _kill(self, process: _Process, why: str) -> None:
        """Its whole session, and what it has started in others; whoever waits for it hears why. Without a reason it has ended by itself,
        and its status says how."""
        if not why:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.running.wait(), _EXIT_S)
        started = _started_by(process.running.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.running.pid, signal.SIGKILL)
        for each in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        status = await process.running.wait()
        printed, reads = process.tasks
        await asyncio.wait({printed}, timeout=1.0)  # a process that has left the session may hold the pipe open
        for task in (printed, reads):
            task.cancel()
        errors = process.errors.decode(errors="replace").strip()
        process.gone = why or f"it ended with status {status}"
        process.gone += f"; the end of its errors:\n{errors}" if errors else ""
        process.ready.set()
        for answer in process.waiting.values():
            if not answer.done():
                answer.set_exception(WorkerFailed(process.gone))


def _started_by(pid: int) -> list[psutil.Process]:
    """Its descendants; none are known if it has ended."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def variables_for(python: str, own: dict[str, str]) -> dict[str, str]:
    """The environment of a worker. Of the run's own it has where programs and caches of data are, and no keys."""
    path = f"{Path(python).parent}:{os.environ.get('PATH', os.defpath)}"
    return {"PATH": path, "LANG": "C.UTF-8", "HOME": os.environ.get("HOME", "/"), **own}
