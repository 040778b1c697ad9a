"""Episodes of a hub's environment, which a worker process in a separate interpreter plays."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Annotated, Any

import psutil
from msgspec import Meta

from megarl.agents.endpoint import MODEL
from megarl.agents.episode import Episode, EpisodeResult
from megarl.agents.player import (
    MOST_METRICS,
    NoReward,
    Player,
    check_on_crash,
    numbers,
    reward_turns,
)
from megarl.base.rollout_types import UNANSWERED, Prompt
from megarl.config.errors import ConfigError, problems_of
from megarl.generator.completions import Sampling
from megarl.rollouts.environments.base import RolloutContext
from megarl.sandbox.jail import descendants

_MOST_LINE_BYTES = 1 << 26  # bound of a reply; each episode has at most 1 << 15
_TAIL_BYTES = 4096
_NO_LIMIT_BYTES = 1 << 62  # more than any machine has, and valid for setrlimit
_EXIT_S = 5.0  # time from its last line to its exit


class WorkerFailed(Exception):
    """The process has ended without an answer, by itself or because it was killed.

    The message has the end of its standard error.
    """


class NotStarted(WorkerFailed):
    """The process has ended before it was ready."""


@dataclass
class _Process:
    running: asyncio.subprocess.Process
    waiting: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)
    errors: bytearray = field(default_factory=bytearray)  # the end of its standard error
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    end_reason: str = ""  # why it has ended; empty while it runs
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    ending: asyncio.Task[None] | None = None


@dataclass
class Worker:
    """A process in another interpreter that plays episodes.

    It answers each JSON line of input with one line of output, in any order. It starts at the first
    request, and again at the next request after it has ended.
    """

    command: Sequence[str]
    variables: dict[str, str]  # all environment variables of the process
    memory_mib: int  # limit of the process's data
    start_s: float  # most time until the process reports that it is ready
    _process: _Process | None = None
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def ask(self, request: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        """The answer to a request.

        Kills the process if it is late: nothing else stops code that never awaits. Raises
        WorkerFailed.
        """
        process = await self._started()
        number = next(self._numbers)
        answer = process.waiting[number] = asyncio.get_running_loop().create_future()
        try:
            assert process.running.stdin is not None
            process.running.stdin.write(json.dumps({"id": number, **request}).encode() + b"\n")
            async with asyncio.timeout(deadline_s):
                return await answer
        except TimeoutError:
            await self._end(process, f"it did not answer within {deadline_s:g} s")
            raise WorkerFailed(process.end_reason) from None
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
        if process.end_reason:
            raise NotStarted(process.end_reason)
        return process

    def _limit(self, pid: int) -> None:
        """Sets limits from outside, since it is unsafe to run code between fork and exec while
        other threads run.
        """
        _, most_bytes = resource.getrlimit(resource.RLIMIT_DATA)
        if most_bytes == resource.RLIM_INFINITY:
            most_bytes = _NO_LIMIT_BYTES
        limit_bytes = min(self.memory_mib << 20, most_bytes)
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            resource.prlimit(pid, resource.RLIMIT_DATA, (limit_bytes, limit_bytes))

    async def _read(self, process: _Process) -> None:
        """Reads replies until the process ends or writes an invalid one."""
        assert process.running.stdout is not None
        reason = ""
        try:
            while line := await process.running.stdout.readline():
                reply = json.loads(line)
                if "ready" in reply:
                    process.ready.set()
                    continue
                waiting = process.waiting.get(reply["id"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(reply)
        except (ValueError, LookupError, TypeError) as error:
            reason = f"it wrote what cannot be read: {error!r}"[:500]
        self._begin_end(process, reason)

    async def _keep_errors(self, process: _Process) -> None:
        assert process.running.stderr is not None
        while data := await process.running.stderr.read(1 << 16):
            process.errors += data
            del process.errors[:-_TAIL_BYTES]

    def _begin_end(self, process: _Process, reason: str) -> asyncio.Task[None]:
        process.ending = process.ending or asyncio.create_task(
            self._kill(process, reason), name="end of a worker"
        )
        return process.ending

    async def _end(self, process: _Process, reason: str) -> None:
        await asyncio.shield(self._begin_end(process, reason))

    async def _kill(self, process: _Process, reason: str) -> None:
        """Kills its whole session, and processes that it has started in other sessions.

        Whoever waits for it gets `reason`. If `reason` is empty, the process has ended by itself,
        and its exit status is the reason.
        """
        if not reason:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.running.wait(), _EXIT_S)
        started = descendants(process.running.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.running.pid, signal.SIGKILL)
        for descendant in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                descendant.kill()
        status = await process.running.wait()
        printed, reads = process.tasks
        # a process that has left the session may hold the pipe open
        await asyncio.wait({printed}, timeout=1.0)
        for task in (printed, reads):
            task.cancel()
        errors = process.errors.decode(errors="replace").strip()
        process.end_reason = reason or f"it ended with status {status}"
        if errors:
            process.end_reason += f"; the end of its errors:\n{errors}"
        process.ready.set()
        for answer in process.waiting.values():
            if not answer.done():
                answer.set_exception(WorkerFailed(process.end_reason))


def variables_for(python: str, variables: dict[str, str]) -> dict[str, str]:
    """The environment variables of a worker.

    From the run's it has only the places of programs and data caches, not keys.
    """
    path = f"{Path(python).parent}:{os.environ.get('PATH', os.defpath)}"
    return {"PATH": path, "LANG": "C.UTF-8", "HOME": os.environ.get("HOME", "/"), **variables}


class Interpreter:
    """Runs `program`, a hub's program in this folder, in the interpreter that has its packages.

    Args: request: the request of the program, as JSON. key: the setting that begins messages.
    folder: modules in it can be imported there. variables: its environment variables, besides PATH
    and HOME.
    """

    def __init__(
        self,
        program: str,
        python: str,
        key: str,
        request: dict[str, Any],
        folder: str | None,
        variables: dict[str, str] | None = None,
    ):
        """Raises: ConfigError if there is no such interpreter or folder."""
        interpreter = shutil.which(os.path.expanduser(python))
        problems = []
        if folder is not None and not Path(folder).is_dir():
            problems.append(f"rollout.args.folder={folder}: there is no such folder")
        if interpreter is None:
            problems.append(f"rollout.args.python={python}: there is no such program")
        if problems or interpreter is None:
            raise ConfigError(problems)
        self._key = key
        self._python = os.path.abspath(interpreter)
        self._program = str(Path(__file__).with_name(program))
        self._request = request
        self._folder = folder
        self._variables = variables or {}

    def command(self, do: str, **fields: Any) -> list[str]:
        return [
            self._python,
            "-u",
            self._program,
            json.dumps({"do": do, **self._request, **fields}),
        ]

    def variables(self) -> dict[str, str]:
        variables = dict(self._variables)
        if self._folder:
            paths = [os.path.abspath(self._folder)]
            if "PYTHONPATH" in variables:
                paths.append(variables["PYTHONPATH"])
            variables["PYTHONPATH"] = os.pathsep.join(paths)
        return variables_for(self._python, variables)

    def check(self, on_crash: float) -> None:
        """Raises ConfigError with all problems of `on_crash` and of what the request needs."""
        problems = problems_of(lambda: check_on_crash(on_crash), lambda: self.run("look", LOOK_S))
        if problems:
            raise ConfigError(problems)

    def worker(self, memory_mib: int, start_s: float) -> Worker:
        return Worker(self.command("serve"), self.variables(), memory_mib, start_s)

    def write_rows(self, files: dict[str, Path], limit_s: float) -> str:
        """Writes rows to `files`, split ("train", "eval") -> file. Returns how many.

        Raises ConfigError.
        """
        paths = {split: str(path.absolute()) for split, path in files.items()}
        return self.run("rows", limit_s, files=paths)

    def run(self, do: str, limit_s: float, **fields: Any) -> str:
        """The program's output.

        Raises ConfigError with the last line of its errors if it fails. Processes that it has
        started end with it, even if they keep a pipe open.
        """
        with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as errors:
            status = self._status(self.command(do, **fields), limit_s, printed, errors)
            output = _written(printed)
            wrong = _written(errors)
        if status:
            last = (wrong.strip().splitlines() or [f"it ended with status {status}"])[-1]
            raise ConfigError(f"{self._key}, with {self._python}: {last}")
        return output

    def _status(
        self, command: list[str], limit_s: float, printed: IO[bytes], errors: IO[bytes]
    ) -> int:
        files = {"stdin": subprocess.DEVNULL, "stdout": printed, "stderr": errors}
        try:
            running = subprocess.Popen(
                command, env=self.variables(), cwd="/", start_new_session=True, **files
            )
        except (OSError, ValueError) as error:  # arguments are too long, or variables are invalid
            raise ConfigError(f"{self._key}: {self._python} cannot be started: {error}") from None
        try:
            return running.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"{self._key}: {self._python} did not answer within {limit_s:g} s"
            ) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()


def _written(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


LOOK_S = 120.0
Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]


@dataclass(eq=False)
class HubRollout(Player):
    """The environment defines rows, turns and reward; a process in another interpreter plays its
    episodes. If that process fails, or an episode has sampled nothing, all episodes of the prompt
    are played again.
    """

    worker: Worker
    deadline_s: float
    # extra time in which the worker reports episodes that it has cut at their deadline
    grace_s: float = 15.0

    failures = ("environment", "deadline", "reward", "worker", UNANSWERED)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._entering = asyncio.Lock()

    async def close(self) -> None:
        await self.worker.close()
        await super().close()

    async def play(
        self, context: RolloutContext, prompt: Prompt, sampling: Sampling, n: int
    ) -> list[EpisodeResult]:
        episodes, reports = await self._attempt(context, prompt, sampling, n)
        results = []
        for episode, report in zip(episodes, reports, strict=True):
            results.append(self._score(prompt, episode, report))
        return results

    async def _attempt(
        self, context: RolloutContext, prompt: Prompt, sampling: Sampling, n: int
    ) -> tuple[list[Episode], list[dict[str, Any]]]:
        """The episodes and the worker's reports, from the first attempt that succeeds or the last.

        A row whose first call has no room is not tried again.
        """
        retries_left = self.retries
        while True:
            episodes = [self.episode(context, sampling, index) for index in range(n)]
            try:
                reports = await self._ask(episodes, prompt)
                failed = False
            except WorkerFailed as failure:
                if isinstance(failure, NotStarted) and not retries_left:
                    raise RuntimeError(
                        f"{self.name} could not be started in {self.retries + 1} attempts: "
                        f"{failure}"
                    ) from failure
                reports = [{"kind": "worker", "error": str(failure)}] * n
                failed = True
            silent = [episode for episode in episodes if not episode.tree.turns]
            hopeless = any(episode.counts["out_of_room"] for episode in silent)
            if not retries_left or (not failed and (not silent or hopeless)):
                return episodes, reports
            retries_left -= 1

    async def _ask(self, episodes: list[Episode], prompt: Prompt) -> list[dict[str, Any]]:
        """The worker's report on each episode.

        Raises WorkerFailed, or the error of a failed call.
        """
        async with contextlib.AsyncExitStack() as context:
            # one prompt at a time, so that two prompts cannot each hold places that the other needs
            async with self._entering:
                for _ in range(min(len(episodes), self.at_once)):
                    await context.enter_async_context(self._places)
            accesses = []
            for episode in episodes:
                serving = self._endpoint.serving(episode, None)
                accesses.append(await context.enter_async_context(serving))
            request = {
                "row": prompt.row,
                "model": MODEL,
                "deadline_s": self.deadline_s,
                "episodes": [
                    {"url": f"http://127.0.0.1:{port}/v1", "key": key} for key, port, *_ in accesses
                ],
            }
            asking = asyncio.ensure_future(self.worker.ask(request, self.deadline_s + self.grace_s))
            failures = [access.failed for access in accesses]
            try:
                await asyncio.wait({asking, *failures}, return_when=asyncio.FIRST_COMPLETED)
                for failed in failures:
                    if failed.done():
                        failed.result()
                return (await asking)["episodes"]
            finally:
                asking.cancel()
                await asyncio.wait({asking})

    def _score(self, prompt: Prompt, episode: Episode, report: dict[str, Any]) -> EpisodeResult:
        kind = report.get("kind", "")
        reason = report.get("error", "")
        if not episode.tree.turns:
            kind = UNANSWERED
            reason = self.unanswered(prompt, episode, reason)
        if not kind:
            reward = {"reward": report["reward"], **report["metrics"]}
            form = f"finite numbers, with at most {MOST_METRICS} names"
            message = f"its reward and metrics are not all {form}: {str(reward)[:200]}"
            try:
                score, metrics = numbers(reward, message)
                if "turn_rewards" in report:
                    turns = report["turn_rewards"]
                    reward_turns(episode.tree, turns, report.get("final_reward", score.reward))
                return self.result_of(episode, score, metrics)
            except NoReward as error:
                kind = "reward"
                reason = str(error)
        self.log_failure(prompt, reason)
        return self.result_of(episode, self.failure_score(kind, reason), {})
