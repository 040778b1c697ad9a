"""The run that `megarl bench faults` harms: one run directory, continued by one launcher after another."""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import psutil

from megarl.bench.fault_orders import ORDERS, order
from megarl.plan.checkpoints import complete_checkpoints
from megarl.rollouts.ledger import Ledger
from megarl.weight_sync.engine.beats import BEATS

ENGINES, PROMPTS, SAMPLES, CHECKPOINT_EVERY = 2, 4, 4, 3
RUN_DIR = "run"  # in the campaign's folder
ENDLESS = 10**6  # steps
HEALTH_S, BATCH_S, TOOL_S = 10, 180, 2
STARTED_S, ENDED_S = 240, 30  # deadlines: until steps are made; until every process of an ended run is gone
NOISE = r"\.{40,}\n"  # from the tool that prints for ever
CONFIG = Path(__file__).resolve().parents[2] / "configs/quickstart.yaml"


Inject = Callable[["FaultRun", Random], dict[str, str]]
"""Injects a fault; returns the words to fill into the expected messages."""


class Hang(Exception):
    """What was waited for did not come in time."""


class Ended(Exception):
    """The run ended while something else was waited for."""


@dataclass
class FaultRun:
    """Everything is written to `folder`; `model` is an HF checkpoint."""

    folder: Path
    model: Path
    launches: int = 0
    started: subprocess.Popen[bytes] | None = None
    seen: set[psutil.Process] = field(default_factory=set)  # descendants of the current launcher
    _read: dict[Path, int] = field(default_factory=dict)  # bytes read of each log
    _heard: str = ""  # what was read since the last mark

    def __post_init__(self) -> None:
        self.run_dir, self.orders = self.folder / RUN_DIR, self.folder / "orders"
        self.orders.mkdir(parents=True, exist_ok=True)

    def start(self, max_steps: int = ENDLESS) -> None:
        """Starts or resumes the run; returns at once."""
        settings = {
            "model.path": self.model, "run_dir": self.run_dir, "max_steps": max_steps, "checkpoint.every": CHECKPOINT_EVERY,
            "rollout.prompts_per_step": PROMPTS, "rollout.n": SAMPLES, "rollout.name": "megarl.bench.fault_hooks:rollout",
            "rollout.args.orders": self.orders, "rollout.tool_timeout_s": TOOL_S, "reward.timeout_s": TOOL_S,
            "generator.engines": ENGINES, "generator.health_s": HEALTH_S, "generator.max_restarts": ENDLESS,
            "weights.transport": "megarl.bench.fault_hooks:FaultyTransport", "async.capacity": 2, "async.partial_rollout": "in_flight",
            "timeouts.rollouts_s": BATCH_S, "eval.every": 0, "eval.limit": 8, "observe.probe_every": 0, "observe.trackers": "[]",
            "observe.rollouts_per_step": 0, "trainer.optimizer.schedule": "constant",
        }  # fmt: skip
        command = [sys.executable, "-P", "-m", "megarl", "train", str(CONFIG), *(f"{key}={value}" for key, value in settings.items())]
        for left in self.orders.iterdir():
            left.unlink()
        self.launches, self.seen, self._read, self._heard = self.launches + 1, set(), {}, ""
        with open(self.output, "wb") as file:
            self.started = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, ORDERS: str(self.orders)}, start_new_session=True
            )

    @property
    def launcher(self) -> subprocess.Popen[bytes]:
        assert self.started is not None
        return self.started

    @property
    def output(self) -> Path:
        """What the current launcher prints."""
        return self.folder / f"launch.{self.launches}.log"

    @property
    def driver_log(self) -> Path:
        return self.run_dir / "logs/generator.0.log"

    def mark(self) -> None:
        """From now on `said` looks only at what launcher and driver print after this call."""
        self._listen()
        self._heard = ""

    def said(self, pattern: str) -> bool:
        self._listen()
        return re.search(pattern, self._heard) is not None

    def _listen(self) -> None:
        for path in (self.output, self.driver_log):
            if path.exists():
                with open(path, "rb") as file:
                    file.seek(self._read.get(path, 0))
                    new = file.read()
                self._read[path] = self._read.get(path, 0) + len(new)
                self._heard += re.sub(NOISE, "", new.decode(errors="replace"))

    def processes(self, *words: str) -> list[psutil.Process]:
        """The launcher's descendants whose command lines contain all the words."""
        found = []
        for process in self.descendants():
            try:
                line = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if all(word in line for word in words):
                found.append(process)
        return found

    def descendants(self) -> list[psutil.Process]:
        try:
            found = psutil.Process(self.launcher.pid).children(recursive=True)
        except psutil.Error:
            return []
        self.seen |= set(found)
        return found

    def trainer(self, rank: int) -> psutil.Process:
        return self.processes("megarl.launch.worker", f"trainer {rank}")[0]

    def generator(self) -> psutil.Process:
        return self.processes("megarl.launch.worker", "generator 0")[0]

    def engine(self, index: int) -> psutil.Process:
        """The engine's server process; the scheduler is a child of it."""
        return self.engines(index)[0]

    def engines(self, index: int) -> list[psutil.Process]:
        """The engine's server process if there is one, recognised by the file of its workers' beats."""
        found = []
        for process in self.processes("megarl.generator.server"):
            with contextlib.suppress(psutil.Error):
                found += [process] if process.environ().get(BEATS, "").endswith(f"/engine.{index}.beats") else []
        return found

    def wait_until(self, holds: Callable[[], bool], what: str, timeout_s: float, every_s: float = 0.25) -> None:
        """Raises Hang past the deadline, Ended when the run ends first."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            self.descendants()
            if self.launcher.poll() is not None:
                if holds():
                    return
                raise Ended(f"the run ended with {self.launcher.returncode} before {what}; its last words:\n{tail(self.output)}")
            if time.monotonic() > deadline:
                raise Hang(f"no {what} within {timeout_s:.0f} s; its last words:\n{tail(self.output, 6)}\n{tail(self.driver_log, 6)}")
            time.sleep(every_s)

    def wait_steps(self, more: int, timeout_s: float = STARTED_S) -> None:
        before = self.steps
        self.wait_until(lambda: self.steps >= before + more, f"{more} more steps", timeout_s)

    def exit_status(self, timeout_s: float) -> int:
        """Raises Hang past the deadline."""
        deadline = time.monotonic() + timeout_s
        while self.launcher.poll() is None:
            self.descendants()
            if time.monotonic() > deadline:
                raise Hang(f"the run did not end within {timeout_s:.0f} s; its last words:\n{tail(self.output, 12)}")
            time.sleep(0.1)
        return self.launcher.returncode

    def orphans(self) -> int:
        """Kills the processes that the ended run left behind; returns how many there were."""
        deadline, alive = time.monotonic() + ENDED_S, [process for process in self.seen if _runs(process)]
        while alive and time.monotonic() < deadline:
            time.sleep(0.1)
            alive = [process for process in alive if _runs(process)]
        for process in alive:
            process.kill()
        return len(alive)

    def kill(self) -> None:
        if self.started is not None and self.started.poll() is None:
            for process in [*self.descendants(), self.launcher]:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            self.launcher.wait()

    @property
    def steps(self) -> int:
        return len(self.trained())

    def trained(self) -> list[list[int]]:
        """The ordinals of every step, from the first."""
        path = self.run_dir / "rollouts/ordinals.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        assert [line["step"] for line in lines] == list(range(len(lines))), f"{path}: steps are missing or repeated"
        return [line["ordinals"] for line in lines]

    def repeated(self) -> list[int]:
        """Ordinals that were trained on more than once."""
        counts = collections.Counter(itertools.chain(*self.trained()))
        return sorted(ordinal for ordinal, count in counts.items() if count > 1)

    def missing(self) -> list[int]:
        """Ordinals that a finished run should have trained on, but did not."""
        trained = set(itertools.chain(*self.trained()))
        return sorted(set(range(self.steps * PROMPTS)) - trained)

    def ledger_problems(self) -> int:
        """How many ordinals differ between the newest checkpoint's ledger and the record of training; call it while nothing runs."""
        found = complete_checkpoints(self.run_dir)
        if not found:
            return 0
        step, folder = found[-1]
        ledger = Ledger.load(folder)
        consumed = ledger.trained()
        trained = set(itertools.chain(*self.trained()[:step]))
        held = {group.ordinal for group in ledger.groups}
        return len(consumed ^ trained) + len(consumed & held)


def _runs(process: psutil.Process) -> bool:
    """A zombie, whose exit status nobody has asked for yet, does not run."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def carried_out(run: FaultRun, name: str, text: str = "") -> None:
    """Gives an order and waits until a process has taken it."""
    order(run.orders, name, text)
    run.wait_until(lambda: not (run.orders / name).exists(), f"process that carries out {name}", STARTED_S, every_s=0.05)


def tail(path: Path, lines: int = 20) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else f"({path}: nothing)"
