"""The trackers of a launch (observe.trackers), each in a process of its own.

A failure is reported and changes nothing else.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from megarl.base.files import log_tail, write_problem
from megarl.config.schema import RunConfig
from megarl.evaluation.scores import complete_metrics
from megarl.launch.processes import inherited
from megarl.launch.start import one_thread
from megarl.observe.metrics import METRICS_FILE
from megarl.observe.tracking import StaleRows, TrackerState

LOOK_S = 1.0
KILLED_S = 5.0
HOPELESS_S = 5.0


class Trackers:
    """Processes that follow `folder`/metrics.jsonl.

    Start them before the run's processes. Call `poll` now and then, `close` at the end.
    """

    def __init__(self, config: RunConfig, folder: Path, tell: Callable[[str], None]):
        self._folder = folder
        self._tell = tell
        self._deadline_s = config.timeouts.trackers_s
        self._names = config.observe.trackers
        self._observe = config.observe
        self._processes: dict[str, subprocess.Popen] = {}
        self._reported: set[str] = set()
        self._looked = 0.0

    def start(self, config_path: Path, first: int) -> None:
        """Starts the processes, which read `config_path` and end with this process.

        `first`: the first step of this start.
        """
        logs = self._folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        stale = json.dumps(asdict(StaleRows.from_step(self._folder / METRICS_FILE, first)))
        for name in self._names:
            replace(
                TrackerState.load(self._folder, name), failures=0, problem="", ended=False
            ).save(self._folder, name)
            argv = [sys.executable, "-P", "-m", "megarl.observe.tracking"]
            argv += [name, str(self._folder), str(config_path), str(first), stale]
            argv += ["--deadline", str(self._deadline_s)]
            argv += ["--project", self._observe.project]
            argv += ["--tags", json.dumps(self._observe.tags)]
            argv += ["--title", self._observe.name or str(self._folder)]
            if self._observe.entity:
                argv += ["--entity", self._observe.entity]
            with open(logs / f"tracker.{name}.log", "wb") as log:
                self._processes[name] = subprocess.Popen(
                    argv,
                    env={**inherited(), **one_thread()},
                    stdin=subprocess.PIPE,  # closing it is the order to finish
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )

    def poll(self) -> None:
        """Reports once for each tracker that it has failed, and why."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        for name, process in self._processes.items():
            if name in self._reported:
                continue
            problem = TrackerState.load(self._folder, name).problem
            if process.poll() is not None:
                self._say(
                    name, f"its process ended ({process.returncode}); {self._last_line(name)}"
                )
            elif problem:
                self._say(name, f"{problem}; it is tried again")

    def close(self) -> None:
        """Lets all trackers finish at once, within timeouts.trackers_s, and reports which could
        not. If they cannot write their own files, the limit is HOPELESS_S. No process of the run
        may be writing any more.
        """
        if self._processes:
            try:
                complete_metrics(self._folder)
            except OSError as error:
                # such as a full disk, which may be the reason why the run has ended
                self._tell(f"{METRICS_FILE} lacks the last evaluation: {error}")
        deadline_s = self._deadline_s
        limit = "timeouts.trackers_s"
        problem = write_problem(self._folder)
        if problem:
            deadline_s = min(deadline_s, HOPELESS_S)
            limit = f"its folder cannot be written to: {problem}"
        deadline = time.monotonic() + deadline_s
        try:
            for process in self._processes.values():
                if process.stdin:
                    process.stdin.close()
            for name, process in self._processes.items():
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    self._say(name, f"it had not finished {deadline_s:g} s after the run ({limit})")
            for name in self._processes:
                tracked = TrackerState.load(self._folder, name)
                if not tracked.ended:
                    cause = f": {tracked.problem}" if tracked.problem else ""
                    self._say(
                        name, f"it may lack steps{cause}; the next start of the run sends them"
                    )
                elif tracked.failures:
                    self._say(
                        name,
                        f"it failed {tracked.failures} times ({tracked.problem}), and has all "
                        "steps now",
                    )
        finally:
            for process in self._processes.values():
                if process.poll() is None:
                    process.kill()
                    process.wait(KILLED_S)

    def _say(self, name: str, text: str) -> None:
        self._reported.add(name)
        self._tell(
            f"tracker {name}: {text} (its log is {self._folder / 'logs' / f'tracker.{name}.log'})"
        )

    def _last_line(self, name: str) -> str:
        return (
            log_tail(self._folder / "logs" / f"tracker.{name}.log", lines=1) or "its log is empty"
        )
