"""Answers `megarl engines`, by which engines join a running run and leave it, and shows what engines
do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from megarl.generator.engine_state import PRESENT, Engine, EngineState
from megarl.generator.fleet import Fleet
from megarl.messaging.link import Hub
from megarl.messaging.messages import EngineRow, FleetAnswer, FleetCall
from megarl.messaging.rendezvous import Rendezvous, note_departure
from megarl.messaging.waiting import Background
from megarl.observe.status import StatusBoard, TraceWriter
from megarl.plan.resolve import RunPlan
from megarl.rollouts.rollout import engine_client

EVERY_S = 0.5
LOOK_S = 0.5


class CallRefused(ValueError):
    """The request cannot be granted."""


@dataclass
class FleetCalls:
    """Answers calls of `megarl engines`, by which engines join a running run and leave it.

    `fixed` returns the reason why engines can neither join nor leave; empty if they can.
    """

    plan: RunPlan
    rendezvous: Rendezvous
    link: Hub
    fleet: Fleet
    background: Background
    fixed: Callable[[], str]
    # engine that joined -> last sign of life of its launcher
    _last_calls: dict[int, float] = field(default_factory=dict)

    async def serve(self) -> None:
        """Runs until its task is cancelled."""
        while True:
            sender, call = await self.link.arrival(FleetCall, None, "calls of megarl engines")
            self.background.start(self._answer(sender, call), f"{call.do} for {sender}")

    async def _answer(self, sender: str, call: FleetCall) -> None:
        try:
            answer = FleetAnswer(call.do, self._rows(await self._done(call)))
        except CallRefused as refused:
            answer = FleetAnswer(call.do, error=str(refused))
        try:
            self.link.send(sender, answer)
        except RuntimeError as error:
            print(f"megarl engines has ended before it was answered: {error}", flush=True)

    async def _done(self, call: FleetCall) -> Iterable[int]:
        """Carries out the call.

        Returns the numbers of the engines concerned. Raises CallRefused.
        """
        if call.do == "list":
            return range(len(self.fleet.engines))
        if call.do == "here":
            self._last_calls |= dict.fromkeys(call.engines, time.monotonic())
            return call.engines
        if not self.fleet.elastic:
            raise CallRefused(
                "generator.on_failure=fail: must be restart or drop for engines to join and leave"
            )
        fixed = self.fixed()
        if fixed:
            raise CallRefused(f"{fixed}: engines can neither join nor leave")
        if call.do == "join":
            names = [group.name for group in self.fleet.groups]
            if call.group not in names:
                raise CallRefused(
                    f"{call.group or 'no group'}: must be one of the run's generator.groups, "
                    f"{', '.join(names)}"
                )
            group = names.index(call.group)
            numbers = []
            for url in call.urls:
                client = engine_client(self.plan, self.rendezvous, url)
                numbers.append(self.fleet.add(client, group).number)
            self._last_calls |= dict.fromkeys(numbers, time.monotonic())
            return numbers
        return await self._let_go(call)

    async def _let_go(self, call: FleetCall) -> list[int]:
        present = sorted(engine.number for engine in self.fleet.engines_in(*PRESENT))
        leaving = call.engines or present[::-1][: call.count]
        if not call.ends and (missing := sorted(set(leaving) - set(present))):
            raise CallRefused(
                f"engine {missing[0]}: there is none; there are {', '.join(map(str, present))}"
            )
        serving = {engine.number for engine in self.fleet.serving} or set(present)
        if serving <= set(leaving):
            raise CallRefused(
                "one engine at least must go on serving, and engine "
                f"{', '.join(map(str, sorted(serving)))} would be gone"
            )
        reason = "its launcher ends" if call.ends else "by command"
        timeout_s = self.plan.config.timeouts.weights_s
        engines = [self.fleet.engines[number] for number in leaving]
        await asyncio.gather(*(self.fleet.leave(engine, reason, timeout_s) for engine in engines))
        return list(leaving)

    def _rows(self, numbers: Iterable[int]) -> list[EngineRow]:
        rows = []
        for number in numbers:
            engine = self.fleet.engines[number]
            row = EngineRow(
                number=number,
                url=engine.url,
                text=self.fleet.describe(engine),
                serving=engine.is_serving,
                gone=engine.state is EngineState.LEFT,
                group=self.fleet.groups[engine.group].name,
            )
            rows.append(row)
        return rows

    async def watch(self) -> None:
        """Tells launchers which engines have left, and gives up lost engines that will not be
        restarted. Runs until cancelled.
        """
        noted_departures: set[Engine] = set()
        while True:
            for engine in self.fleet.down:
                reason = self._reason_to_give_up(engine)
                if reason:
                    await self.fleet.leave(engine, reason, 0)
            for engine in self.fleet.engines_in(EngineState.LEFT):
                if engine not in noted_departures:
                    folder = Path(self.rendezvous.key_file).parent
                    note_departure(folder, f"{self.fleet.name}.{engine.number}")
                    noted_departures.add(engine)
            await asyncio.sleep(LOOK_S)

    def _reason_to_give_up(self, engine: Engine) -> str:
        """Empty if the engine may still run again, or if it is of the run's own launchers."""
        last_call = self._last_calls.get(engine.number)
        if last_call is None:
            return ""
        if engine.state is EngineState.LOST and self.plan.config.generator.on_failure == "drop":
            return "it was lost"
        silence_s = self.plan.config.timeouts.silence_s
        if time.monotonic() - last_call > silence_s:
            return f"its launcher has given no sign of life for {silence_s:.0f} s"
        return ""


async def show_engines(fleet: Fleet, run_dir: Path, trace: TraceWriter) -> None:
    """Updates the engines' lines in the live display and in the trace, until its task is cancelled.
    The generator does it, since engines know nothing about the run.

    Within half a second, an engine's track shows that it is lost, joins or leaves. When it serves
    again, the track shows how long it was away.
    """
    boards: dict[str, StatusBoard] = {}  # track -> its line
    away_since: dict[str, float] = {}
    gone_engines: set[str] = set()
    while True:
        for engine in fleet.engines:
            track = f"{fleet.name}.{engine.number}"
            if track not in boards:
                boards[track] = StatusBoard(run_dir, track)
            text = fleet.describe(engine)
            if text != boards[track].text:
                boards[track].set(text)
            now = time.perf_counter()
            if engine.is_down and track not in away_since:
                away_since[track] = now
                joins = engine.state is EngineState.STARTING
                trace.mark("joins" if joins else "lost", track, why=engine.reason)
            elif engine.is_serving and track in away_since:
                trace.add("away", away_since.pop(track), now, track)
            elif engine.state is EngineState.LEFT and track not in gone_engines:
                gone_engines.add(track)
                away_since.pop(track, None)
                trace.mark("left", track, why=engine.reason)
        await asyncio.sleep(EVERY_S)
