"""Keeps the engines of one node alive.

An engine that dies, or does not answer for too long, is restarted on the same port.

A worker may be busy with a command of a weight update for up to timeouts.weights_s, and then its
scheduler cannot answer. Meanwhile it gives signs of life through a file
(megarl.base.processes.beating).

A restarted engine gets its weights from the driver before it serves
(megarl.generator.fleet.watch_returns).
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Container
from dataclasses import dataclass, field, replace
from pathlib import Path

from megarl.base.processes import BEATS
from megarl.generator.server import RESTARTS
from megarl.launch.processes import ProcessFailed, ProcessGroup, ProcessSpec, occupied_ports
from megarl.observe.status import TraceWriter

LOOK_UP_S = 1.0
# between two polls, which are normally 0.1 s apart, this is a standstill of the launcher
STILL_S = 5.0


@dataclass
class KeptEngine:
    spec: ProcessSpec
    host: str
    port: int
    key: str  # key for requests
    spare: bool = False  # training does not need it
    restarts: int = 0
    started: float = field(default_factory=time.monotonic)
    answered: float | None = None  # time of its last answer; None: no answer since its start
    ever_answered: bool = False
    beaten: float = 0.0  # time at which a new beat was last seen
    beat: int = 0  # modification time of its beats file then
    looked: float = 0.0

    def ask(self, timeout_s: float) -> None:
        """Sends a request that SGLang's schedulers themselves answer, even while they are paused
        for an update.
        """
        started = self.started
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            connection.request(
                "GET", "/server_info", headers={"Authorization": f"Bearer {self.key}"}
            )
            if connection.getresponse().status == 200 and started == self.started:
                self.answered = time.monotonic()
                self.ever_answered = True
        except (OSError, http.client.HTTPException):
            pass  # `answered` is then not updated
        finally:
            connection.close()

    def look(self, now: float) -> None:
        """Looks for a new beat. Times are from this process's clock, not from a file server."""
        if now - self.looked < LOOK_UP_S or BEATS not in self.spec.env:
            return
        self.looked = now
        path = Path(self.spec.env[BEATS])
        beat = path.stat().st_mtime_ns if path.exists() else 0
        if beat != self.beat:
            self.beat = beat
            self.beaten = now


class EngineKeeper:
    """Restarts the engines of this node.

    `policy` is generator.on_failure. With `fail` it keeps no engines: an engine that dies ends the
    run, like any other process.

    `departures` contains the processes of engines that have left the run. They are ended and not
    restarted.
    """

    def __init__(
        self,
        processes: ProcessGroup,
        policy: str,
        max_restarts: int,
        health_s: float,
        startup_s: float,
        trace: TraceWriter | None = None,
        departures: Container[str] = (),
    ):
        self._trace = trace
        self._processes = processes
        self._policy = policy
        self._max_restarts = max_restarts
        self._departures = departures
        self._health_s = health_s
        self._startup_s = startup_s
        self._engines: dict[str, KeptEngine] = {}
        self._polled = time.monotonic()
        self._broken: Exception | None = None  # the error of the thread that asks engines

    @property
    def names(self) -> set[str]:
        """The names of processes whose death does not by itself end the run."""
        return {
            name
            for name in self._processes.names
            if name in self._engines or name in self._departures
        }

    def keep(self, spec: ProcessSpec, host: str, port: int, key: str, spare: bool = False) -> None:
        """Begins to keep an engine.

        The run ends if it dies more often than allowed, unless it is `spare`.
        """
        if self._policy == "fail":
            return
        engine = KeptEngine(spec, host, port, key, spare)
        self._engines[spec.name] = engine
        threading.Thread(
            target=self._ask_on, args=[engine], name=f"health of {spec.name}", daemon=True
        ).start()

    def poll(self) -> None:
        """Restarts engines.

        Raises ProcessFailed, with the end of its log, for an engine that has died more often than
        allowed.
        """
        if self._broken is not None:
            raise RuntimeError(
                f"the engines' health cannot be checked: {self._broken!r}"
            ) from self._broken
        self._forgive_own_silence()
        for name in [name for name in self._processes.names if name in self._departures]:
            print(f"{name} has left the run, and is ended", flush=True)
            self._drop(name)
        for name, engine in list(self._engines.items()):
            problem = self._hangs(engine)
            if problem and name in self._processes.running():
                print(f"{name} {problem}; it is ended", flush=True)
                self._processes.kill(name)
                continue
            failure = self._processes.failure(name)
            if failure is not None:
                self._replace(name, engine, failure)

    def _forgive_own_silence(self) -> None:
        """Forgives silent engines if this launcher itself stood still (SIGSTOP, a hanging file
        server) and could not notice answers.
        """
        before = self._polled
        self._polled = time.monotonic()
        still_s = self._polled - before
        if still_s < STILL_S:
            return
        print(
            f"this launcher stood still for {still_s:.0f} s: it was stopped, or the system was "
            "too busy; the run goes on",
            flush=True,
        )
        for engine in self._engines.values():
            engine.started = engine.started + still_s
            engine.beaten = engine.beaten + still_s
            engine.answered = engine.answered and engine.answered + still_s

    def _hangs(self, engine: KeptEngine) -> str:
        now = time.monotonic()
        if engine.answered is None:
            if now - engine.started > self._startup_s:
                return f"did not answer within {self._startup_s:.0f} s of its start"
            return ""
        if now - engine.answered > self._health_s / 2:
            engine.look(now)
        silence_s = now - max(engine.answered, engine.beaten)
        if silence_s > self._health_s + LOOK_UP_S:
            return f"has answered nothing for {silence_s:.0f} s"
        return ""

    def _replace(self, name: str, engine: KeptEngine, failure: ProcessFailed) -> None:
        if self._policy == "drop":
            print(f"{failure}\n{name} is dropped: generator.on_failure=drop", flush=True)
            self._drop(name)
            return
        # it would fail again in the same way
        useless = not engine.ever_answered and not failure.signalled
        if not useless and engine.spare and engine.restarts == self._max_restarts:
            print(
                f"{failure}\n{name} is dropped after generator.max_restarts={self._max_restarts}; "
                "the run goes on without it",
                flush=True,
            )
            self._drop(name)
            return
        if useless or engine.restarts == self._max_restarts:
            raise failure
        engine.restarts += 1
        if self._trace is not None:
            self._trace.mark(
                f"start {name} again",
                name,
                why=failure.ending,
                cause=failure.cause,
                restarts=engine.restarts,
            )
        print(
            f"{failure.ending}; started again ({engine.restarts} of "
            f"generator.max_restarts={self._max_restarts})",
            flush=True,
        )
        if failure.cause:
            print(f"{name}: {failure.cause}", flush=True)
        for line in occupied_ports({name: engine.port}, engine.host, self._processes.process_ids()):
            print(line, flush=True)
        engine.started = time.monotonic()
        engine.answered = None
        self._processes.start(
            replace(engine.spec, env={**engine.spec.env, RESTARTS: str(engine.restarts)})
        )

    def _drop(self, name: str) -> None:
        self._engines.pop(name, None)
        self._processes.forget(name)

    def _ask_on(self, engine: KeptEngine) -> None:
        try:
            while self._engines.get(engine.spec.name) is engine:
                engine.ask(self._health_s)
                time.sleep(LOOK_UP_S)
        except Exception as error:
            self._broken = error
