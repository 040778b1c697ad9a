"""Calls one function in worker processes, for an asyncio program.

If a call crashes its process, other calls still get their results.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from megarl.base.files import log_tail
from megarl.config.errors import RunError
from megarl.sandbox.process import MAX_REPLY_BYTES

_BATCH = 32  # requests written to a worker at once
_START_TIMEOUT_S = 60.0
_GRACE_S = 0.1
_KILLED_S = 2.0
_MAX_FAILED_STARTS = 3
_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
_WORKER = (
    "import sys; sys.path.extend(sys.argv[1].split(':')); from {module} import main; "
    "main(*sys.argv[2:])"
)


class CallFailed(Exception):
    """A call has no result.

    `kind` says why: the function raised an "error", took too long ("timeout"), ran out of "memory",
    or ended its worker ("exit").
    """

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


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
        # it hangs in a system call; do not wait for it
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_KILLED_S)


class WorkerPool:
    """Runs the main function of `module` in `workers` processes, each under a limit on memory
    beyond its imports and a time limit per call.

    `main(*arguments, memory_mib, timeout_s, parent)` serves requests with
    megarl.sandbox.process.serve; all its arguments are strings. A call that takes longer than
    `timeout_s` fails, and its worker is replaced. A call that has ended two workers fails too.
    Every other call is answered, whatever happens to a worker. If no worker can be started, pending
    and later calls raise RunError, which names the pool by `name`. Output and tracebacks of the
    functions go to `log_folder`/<name>.<number>.log, one file per worker, or to standard error.
    Call `open` and `close` in one event loop.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        workers: int,
        timeout_s: float,
        memory_mib: int,
        paths: Sequence[str] = (),
        log_folder: Path | None = None,
        as_here: bool = False,
        passed: Sequence[str] = (),
    ):
        """`paths`: folders to import from, besides this package's.

        `as_here`: workers have this process's working directory and environment. Otherwise they
        have the root directory, and only PATH and the variables in `passed`.
        """
        self.name = name
        self.timed_out = 0  # calls that took too long
        self.replaced = 0  # workers lost for any reason
        code = _WORKER.format(module=module)
        limits = (str(memory_mib), str(timeout_s), str(os.getpid()))
        self._command = [
            sys.executable,
            "-s",
            "-P",
            "-u",
            "-c",
            code,
            ":".join([_PACKAGE_PARENT, *paths]),
            *arguments,
            *limits,
        ]
        self._timeout_s = timeout_s
        self._workers = workers
        self._log_folder = log_folder
        self._as_here = as_here
        self._passed = passed
        self._waiting: deque[_Request] = deque()
        self._arrived = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: RuntimeError | None = None

    def open(self) -> None:
        self._tasks = [
            asyncio.create_task(self._serve(i), name=f"{self.name} worker {i}")
            for i in range(self._workers)
        ]

    async def close(self) -> None:
        """Ends the workers. Pending calls raise RuntimeError."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail(RuntimeError(f"the {self.name} pool is closed"))

    async def call(self, *arguments: Any) -> Any:
        """The function's result; arguments and result are JSON.

        Raises CallFailed; RunError if no worker can be started.
        """
        if self._failure is not None:
            raise self._failure
        line = json.dumps(arguments, default=msgspec.to_builtins).encode() + b"\n"
        request = _Request(line, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._arrived.set()
        return await request.result

    def log(self, number: int) -> Path | None:
        """The file with the output of worker slot `number`."""
        if not self._log_folder:
            return None
        return self._log_folder / f"{self.name.replace(':', '.')}.{number}.log"

    async def _serve(self, number: int) -> None:
        """Serves one worker slot: starts a process, gives it waiting requests, replaces it when it
        is lost.
        """
        worker: _Worker | None = None
        try:
            while True:
                worker = worker or await self._start(number)
                if worker is None:
                    return
                batch = await self._take()
                if not await self._run(worker, batch):
                    worker.kill()
                    worker = None
                    self.replaced += 1
        except Exception as error:
            # nobody awaits this task while the pool is in use, so the error must go to the callers
            self._fail(RuntimeError(f"{self.name} worker failed: {error!r}"))
            raise
        finally:
            if worker is not None:
                worker.kill()

    async def _take(self) -> deque[_Request]:
        """Takes a fair share of the waiting requests, at least one."""
        while not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()
        share = min(_BATCH, -(-len(self._waiting) // self._workers))
        return deque(self._waiting.popleft() for _ in range(share))

    async def _run(self, worker: _Worker, batch: deque[_Request]) -> bool:
        """Answers the batch in order.

        Returns False if the worker is lost. Unanswered requests are then put back at the front.
        """
        worker.writer.write(b"".join(request.line for request in batch))
        try:
            while batch:
                reply = await self._reply(worker)
                if reply is None or not reply.endswith(b"\n"):
                    self._blame(batch, worker, timed_out=reply is None)
                    return False
                _answer(batch.popleft(), json.loads(reply))
            return True
        finally:
            self._waiting.extendleft(reversed(batch))
            if batch:
                self._arrived.set()

    async def _reply(self, worker: _Worker) -> bytes | None:
        """The next line; empty or incomplete if the worker died; None if it took too long and was
        killed.
        """
        loop = asyncio.get_running_loop()
        expired = False

        def warn() -> None:  # if the event loop was blocked, it must first read what has arrived
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

    def _blame(self, batch: deque[_Request], worker: _Worker, timed_out: bool) -> None:
        """Blames the first request of the batch, which the worker was busy with.

        It fails if it timed out or has ended its second worker.
        """
        worker.kill()
        status = worker.process.returncode
        timed_out = timed_out or status == -signal.SIGXCPU
        batch[0].lost_workers += 1
        self.timed_out += timed_out
        if timed_out:
            _answer(
                batch.popleft(),
                {"error": f"it took longer than {self._timeout_s:g} s", "kind": "timeout"},
            )
        elif batch[0].lost_workers > 1:
            ending = f"exit status {status}"
            if status < 0:
                ending = f"killed by {signal.Signals(-status).name}"
            _answer(
                batch.popleft(),
                {"error": f"it brought its process down ({ending})", "kind": "exit"},
            )

    async def _start(self, number: int) -> _Worker | None:
        """A worker that is ready; None once starting has failed for good."""
        code = None
        for _ in range(_MAX_FAILED_STARTS):
            worker = await self._spawn(number)
            try:
                line = await asyncio.wait_for(worker.reader.readline(), _START_TIMEOUT_S)
            except (TimeoutError, ConnectionError):
                line = b""
            except asyncio.CancelledError:
                worker.kill()
                raise
            if line == b"ready\n":
                return worker
            worker.kill()
            code = worker.process.returncode
        attempts = f"{_MAX_FAILED_STARTS} attempts, last exit status {code}"
        log = self.log(number)
        errors = f"the end of {log}:\n{log_tail(log)}" if log else "its errors are on stderr"
        self._fail(RunError(f"{self.name} worker did not start ({attempts}); {errors}"))
        return None

    async def _spawn(self, number: int) -> _Worker:
        pool_socket, worker_socket = socket.socketpair()
        log = self.log(number)
        with worker_socket, open(log, "ab") if log else contextlib.nullcontext() as printed:
            reader, writer = await asyncio.open_connection(
                sock=pool_socket, limit=MAX_REPLY_BYTES + 1
            )
            # No await from here until the process is known: a cancellation at that moment would
            # leave it behind. PYTHONHASHSEED is fixed, so that results do not depend on the order
            # of sets in each worker.
            passed = {name: os.environ[name] for name in self._passed if name in os.environ}
            # Each library would start a thread for every core in each worker; threads reserve
            # memory.
            inherited = {"PATH": os.environ.get("PATH", ""), "LANG": "C.UTF-8", **passed}
            if self._as_here:
                inherited = {"OMP_NUM_THREADS": "1", **os.environ}
            environment = {**inherited, "PYTHONHASHSEED": "0"}
            folder = None if self._as_here else "/"
            end = worker_socket.fileno()
            process = subprocess.Popen(
                self._command, stdin=end, stdout=end, stderr=printed, env=environment, cwd=folder
            )
        return _Worker(process, reader, writer)

    def _fail(self, error: RuntimeError) -> None:
        self._failure = self._failure or error
        while self._waiting:
            request = self._waiting.popleft()
            if not request.result.done():
                request.result.set_exception(self._failure)


def _answer(request: _Request, reply: dict[str, Any]) -> None:
    if request.result.done():  # the caller may have cancelled it
        return
    if "error" in reply:
        request.result.set_exception(CallFailed(reply["kind"], reply["error"]))
    else:
        request.result.set_result(reply["result"])
