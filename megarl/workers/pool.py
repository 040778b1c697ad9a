"""Calls of one function in worker processes, for an asyncio program. Whatever a call does to its process, the others get their answers."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from megarl.workers.process import MAX_REPLY_BYTES

_BATCH = 32  # requests written to a worker at once
_START_TIMEOUT_S = 60.0
_GRACE_S = 0.1
_MAX_FAILED_STARTS = 3
_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
_WORKER = "import sys; sys.path.extend(sys.argv[1].split(':')); from {module} import main; main(*sys.argv[2:])"


class CallFailed(Exception):
    """A call without a result: it raised, took too long, or brought its worker down. Says which."""


@dataclass
class _Request:
    line: bytes
    result: asyncio.Future[Any]
    lost_workers: int = 0


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def kill(self) -> None:
        self.writer.close()
        self.process.kill()
        self.process.wait()


class WorkerPool:
    """Runs the main function of `module` in `workers` processes, each under a memory limit and a time limit per call.

    `main(*arguments, memory_mib, timeout_s, parent)` serves requests by megarl.workers.process.serve; all its arguments
    are strings. A call that takes longer than `timeout_s` fails and costs its worker, which is replaced; so does one that
    has brought down two workers. Every other call is answered whatever happens to a worker. If workers cannot be started
    at all, pending and later calls raise RuntimeError, which calls the pool by its `name`. `open` and `close` in one event loop.
    """

    def __init__(
        self, name: str, module: str, arguments: Sequence[str], workers: int, timeout_s: float, memory_mib: int, paths: Sequence[str] = ()
    ):
        """`paths` are places to import from, beside that of this package."""
        self.name = name
        self.timed_out = 0  # calls failed for their time
        self.replaced = 0  # workers lost, for whatever reason
        code = _WORKER.format(module=module)
        limits = (str(memory_mib), str(timeout_s), str(os.getpid()))
        self._command = [sys.executable, "-I", "-c", code, ":".join([_PACKAGE_PARENT, *paths]), *arguments, *limits]
        self._timeout_s = timeout_s
        self._workers = workers
        self._waiting: deque[_Request] = deque()
        self._arrived = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: Optional[RuntimeError] = None

    def open(self) -> None:
        self._tasks = [asyncio.create_task(self._serve(), name=f"{self.name} worker {i}") for i in range(self._workers)]

    async def close(self) -> None:
        """End the workers. Calls still pending raise RuntimeError."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail(RuntimeError(f"the {self.name} pool is closed"))

    async def call(self, *arguments: Any) -> Any:
        """The function's result; arguments and result are JSON. Raises: CallFailed; RuntimeError if no worker can be started."""
        if self._failure is not None:
            raise self._failure
        request = _Request(json.dumps(arguments).encode() + b"\n", asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._arrived.set()
        return await request.result

    async def _serve(self) -> None:
        """Life of one worker slot: start a process, give it what waits, replace it when it is lost."""
        worker: Optional[_Worker] = None
        try:
            while True:
                worker = worker or await self._start()
                if worker is None:
                    return
                batch = await self._take()
                if not await self._run(worker, batch):
                    worker.kill()
                    worker = None
                    self.replaced += 1
        except Exception as error:  # nobody awaits this task while the pool is in use: tell those who wait for results
            self._fail(RuntimeError(f"{self.name} worker failed: {error!r}"))
            raise
        finally:
            if worker is not None:
                worker.kill()

    async def _take(self) -> deque[_Request]:
        """A fair share of what waits, at least one request."""
        while not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()
        share = min(_BATCH, -(-len(self._waiting) // self._workers))
        return deque(self._waiting.popleft() for _ in range(share))

    async def _run(self, worker: _Worker, batch: deque[_Request]) -> bool:
        """Answer the batch in order; False if the worker is lost, with what it left unanswered waiting again, first in line."""
        worker.writer.write(b"".join(request.line for request in batch))
        try:
            while batch:
                reply = await self._reply(worker)
                if reply is None or not reply.endswith(b"\n"):
                    self._blame(batch, timed_out=reply is None)
                    return False
                _answer(batch.popleft(), json.loads(reply))
            return True
        finally:
            self._waiting.extendleft(reversed(batch))
            if batch:
                self._arrived.set()

    async def _reply(self, worker: _Worker) -> Optional[bytes]:
        """The next line, empty or cut short if the worker died, None if it took too long (it is then dead too)."""
        loop = asyncio.get_running_loop()
        expired = False

        def warn() -> None:  # a loop that was itself held up reads what has come in meanwhile before it judges
            nonlocal timer
            timer = loop.call_later(_GRACE_S, expire)

        def expire() -> None:
            nonlocal expired
            expired = True
            worker.process.kill()

        timer = loop.call_later(self._timeout_s, warn)
        try:
            reply = await worker.reader.readline()
        except ConnectionError:
            reply = b""
        finally:
            timer.cancel()
        return None if expired else reply

    def _blame(self, batch: deque[_Request], timed_out: bool) -> None:
        """The worker was busy with the first of the batch: that one fails for its time, or the second time it loses a worker."""
        batch[0].lost_workers += 1
        self.timed_out += timed_out
        if timed_out or batch[0].lost_workers > 1:
            reason = f"it took longer than {self._timeout_s:g} s" if timed_out else "it brought its process down"
            _answer(batch.popleft(), {"error": reason})

    async def _start(self) -> Optional[_Worker]:
        """A worker that has said it is ready; None once starting has failed for good."""
        for _ in range(_MAX_FAILED_STARTS):
            worker = await self._spawn()
            try:
                line = await asyncio.wait_for(worker.reader.readline(), _START_TIMEOUT_S)
            except (asyncio.TimeoutError, ConnectionError):
                line = b""
            except asyncio.CancelledError:
                worker.kill()
                raise
            if line == b"ready\n":
                return worker
            worker.kill()
        code = worker.process.returncode
        attempts = f"{_MAX_FAILED_STARTS} attempts, last exit status {code}"
        self._fail(RuntimeError(f"{self.name} worker did not start ({attempts}); its errors are on stderr"))
        return None

    async def _spawn(self) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_REPLY_BYTES + 1)
            # Nothing is awaited from here until the process is known: a close at that moment would leave it behind.
            environment = {"PATH": os.environ.get("PATH", ""), "LANG": "C.UTF-8"}
            process = subprocess.Popen(self._command, stdin=theirs, stdout=theirs, env=environment, cwd="/")
        return _Worker(process, reader, writer)

    def _fail(self, error: RuntimeError) -> None:
        self._failure = self._failure or error
        while self._waiting:
            request = self._waiting.popleft()
            if not request.result.done():
                request.result.set_exception(self._failure)


def _answer(request: _Request, reply: dict[str, Any]) -> None:
    if request.result.done():  # its caller may have given up
        return
    if "error" in reply:
        request.result.set_exception(CallFailed(reply["error"]))
    else:
        request.result.set_result(reply["result"])
