"""The engines of one node, kept alive: one that dies, or answers nothing for too long, is started again on the same port.

What an engine that was started again must be given before it serves is the driver's business (generator.returns).
"""

from __future__ import annotations

import http.client
import threading
import time
from dataclasses import dataclass, field

from megarl.launch.processes import ProcessFailed, ProcessGroup, ProcessSpec

LOOK_UP_S = 1.0


@dataclass
class KeptEngine:
    spec: ProcessSpec
    host: str
    port: int
    key: str  # for requests
    restarts: int = 0
    started: float = field(default_factory=time.monotonic)
    answered: float | None = None  # when it last did; None: not since it was started

    def ask(self, timeout_s: float) -> None:
        """Asks for what SGLang's schedulers themselves must answer, also while they stand still for an update."""
        started = self.started
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            connection.request("GET", "/server_info", headers={"Authorization": f"Bearer {self.key}"})
            if connection.getresponse().status == 200 and started == self.started:
                self.answered = time.monotonic()
        except (OSError, http.client.HTTPException):
            pass  # that nothing was answered is seen by `answered`
        finally:
            connection.close()


class EngineKeeper:
    """`policy` is generator.on_failure; under `fail` nothing is kept, and the death of an engine ends the run like any other's."""

    def __init__(self, processes: ProcessGroup, policy: str, max_restarts: int, health_s: float, startup_s: float):
        self._processes, self._policy, self._max_restarts = processes, policy, max_restarts
        self._health_s, self._startup_s = health_s, startup_s
        self._engines: dict[str, KeptEngine] = {}

    @property
    def names(self) -> set[str]:
        """Of the engines whose death does not end the run by itself."""
        return set(self._engines)

    def keep(self, spec: ProcessSpec, host: str, port: int, key: str) -> None:
        if self._policy == "fail":
            return
        engine = KeptEngine(spec, host, port, key)
        self._engines[spec.name] = engine
        threading.Thread(target=self._ask_on, args=[engine], name=f"health of {spec.name}", daemon=True).start()

    def poll(self) -> None:
        """Raises ProcessFailed, with the end of its log, for an engine that has died once more than it may."""
        for name, engine in list(self._engines.items()):
            if (problem := self._hangs(engine)) and name in self._processes.running():
                print(f"{name} {problem}; it is ended", flush=True)
                self._processes.kill(name)
            elif (failure := self._processes.failure(name)) is not None:
                self._replace(name, engine, failure)

    def _hangs(self, engine: KeptEngine) -> str:
        now = time.monotonic()
        if engine.answered is None:
            return f"did not answer within {self._startup_s:.0f} s of its start" if now - engine.started > self._startup_s else ""
        silence_s = now - engine.answered
        return f"has answered nothing for {silence_s:.0f} s" if silence_s > self._health_s + LOOK_UP_S else ""

    def _replace(self, name: str, engine: KeptEngine, failure: ProcessFailed) -> None:
        if self._policy == "drop":
            print(f"{failure}\n{name} is dropped: generator.on_failure=drop", flush=True)
            del self._engines[name]
            self._processes.forget(name)
            return
        if engine.restarts == self._max_restarts:
            raise failure
        engine.restarts += 1
        print(f"{failure.how}; started again ({engine.restarts} of generator.max_restarts={self._max_restarts})", flush=True)
        engine.started, engine.answered = time.monotonic(), None
        self._processes.start(engine.spec)

    def _ask_on(self, engine: KeptEngine) -> None:
        while self._engines.get(engine.spec.name) is engine:
            engine.ask(self._health_s)
            time.sleep(LOOK_UP_S)
