"""Verification in worker processes, for an asyncio program."""

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
from typing import Optional

from megarl.config.errors import ConfigError
from megarl.config.schema import RewardConfig
from megarl.rewards.verify import MAX_TEXT_CHARS, VERIFIERS

_BATCH = 32  # requests written to a worker at once
_START_TIMEOUT_S = 60.0
_GRACE_S = 0.1
_MAX_FAILED_STARTS = 3
_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
_WORKER = "import sys; sys.path.append(sys.argv[1]); from megarl.rewards.worker import main; main(*sys.argv[2:])"


@dataclass
class _Request:
    line: bytes
    score: asyncio.Future[float]
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


class RewardPool:
    """Scores texts in `workers` processes, each under a memory limit and a time limit per text.

    A text that takes longer than `timeout_s` scores 0 and costs its worker, which is replaced; so does a text that has
    brought down two workers. Every other request is answered whatever happens to a worker. If workers cannot be
    started at all, pending and later calls raise RuntimeError. Use as `async with`, in one event loop.

    Raises: ConfigError for an unknown verifier or impossible limits.
    """

    def __init__(self, verifier: str = "math", workers: int = 1, timeout_s: float = 5.0, memory_mib: int = 1024):
        if verifier not in VERIFIERS:
            raise ConfigError(f"reward.name={verifier}: must be one of {', '.join(sorted(VERIFIERS))}")
        if workers < 1 or timeout_s <= 0:
            raise ConfigError(f"reward.workers={workers}, reward.timeout_s={timeout_s}: must both be above 0")
        self.timed_out = 0  # texts scored 0 for their time
        self.replaced = 0  # workers lost, for whatever reason
        self._arguments = (verifier, str(memory_mib), str(timeout_s), str(os.getpid()))
        self._timeout_s = timeout_s
        self._workers = workers
        self._waiting: deque[_Request] = deque()
        self._arrived = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: Optional[RuntimeError] = None

    @classmethod
    async def start(cls, config: RewardConfig) -> RewardPool:
        """A pool at work; to be ended with `close`."""
        return await cls(config.name, config.workers, config.timeout_s, config.memory_mib).__aenter__()

    async def __aenter__(self) -> RewardPool:
        self._tasks = [asyncio.create_task(self._serve(), name=f"reward worker {i}") for i in range(self._workers)]
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the workers. Requests still pending raise RuntimeError."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail(RuntimeError("the reward pool is closed"))

    async def score(self, text: str, answer: str) -> float:
        """Reward of a response text given the reference answer. Raises: RuntimeError if no worker can be started."""
        if self._failure is not None:
            raise self._failure
        if len(text) > MAX_TEXT_CHARS:
            return 0.0
        request = _Request(json.dumps([text, answer]).encode() + b"\n", asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._arrived.set()
        return await request.score

    async def score_many(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Rewards of (text, answer) pairs, in their order. Raises: as `score`."""
        return await asyncio.gather(*(self.score(text, answer) for text, answer in pairs))

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
        except Exception as error:  # nobody awaits this task while the pool is in use: tell those who wait for scores
            self._fail(RuntimeError(f"reward worker failed: {error!r}"))
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
                _answer(batch.popleft(), float(reply))
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
        """The worker was busy with the first of the batch: score it 0 for its time, or the second time it loses a worker."""
        batch[0].lost_workers += 1
        self.timed_out += timed_out
        if timed_out or batch[0].lost_workers > 1:
            _answer(batch.popleft(), 0.0)

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
        self._fail(RuntimeError(f"reward worker did not start ({attempts}); its errors are on stderr"))
        return None

    async def _spawn(self) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", _WORKER, _PACKAGE_PARENT, *self._arguments], stdin=theirs, stdout=theirs,
                env={"PATH": os.environ.get("PATH", ""), "LANG": "C.UTF-8"}, cwd="/",
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        return _Worker(process, reader, writer)

    def _fail(self, error: RuntimeError) -> None:
        self._failure = self._failure or error
        while self._waiting:
            request = self._waiting.popleft()
            if not request.score.done():
                request.score.set_exception(self._failure)


def _answer(request: _Request, score: float) -> None:
    if not request.score.done():  # its caller may have given up
        request.score.set_result(score)
