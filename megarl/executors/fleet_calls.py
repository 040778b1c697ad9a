"""Answers `megarl engines`: engines join a running run and leave it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from megarl.generator.fleet import Fleet
from megarl.messaging.background import Background
from megarl.messaging.departures import note_departure
from megarl.messaging.link import Hub
from megarl.messaging.messages import EngineState, FleetAnswer, FleetCall
from megarl.messaging.rendezvous import Rendezvous
from megarl.plan.resolve import RunPlan
from megarl.rollouts.rollout import engine_client

LOOK_S = 0.5


class Refused(ValueError):
    """What was asked for cannot be."""


@dataclass
class FleetCalls:
    """The generator's end. `fixed` says why engines can neither join nor leave; it is empty if they can."""

    plan: RunPlan
    rendezvous: Rendezvous
    link: Hub
    fleet: Fleet
    background: Background
    fixed: Callable[[], str]
    _heard: dict[int, float] = field(default_factory=dict)  # engines that joined: when their launcher was last heard of

    async def serve(self) -> None:
        """Runs until its task is cancelled."""
        while True:
            sender, call = await self.link.arrival(FleetCall, None, "calls of megarl engines")
            self.background.start(self._answer(sender, call), f"{call.do} for {sender}")

    async def _answer(self, sender: str, call: FleetCall) -> None:
        try:
            answer = FleetAnswer(call.do, self._states(await self._done(call)))
        except Refused as refused:
            answer = FleetAnswer(call.do, error=str(refused))
        try:
            self.link.send(sender, answer)
        except RuntimeError as error:
            print(f"megarl engines has ended before it was answered: {error}", flush=True)

    async def _done(self, call: FleetCall) -> Iterable[int]:
        """Does what is asked, and returns the engines that it was about. Raises Refused."""
        if call.do == "list":
            return range(len(self.fleet.engines))
        if call.do == "here":
            self._heard |= dict.fromkeys(call.engines, time.monotonic())
            return call.engines
        if not self.fleet.elastic:
            raise Refused("generator.on_failure=fail: must be restart or drop for engines to join and leave")
        if fixed := self.fixed():
            raise Refused(f"{fixed}: engines can neither join nor leave")
        if call.do == "join":
            numbers = [self.fleet.add(engine_client(self.plan, self.rendezvous, url)) for url in call.urls]
            self._heard |= dict.fromkeys(numbers, time.monotonic())
            return numbers
        return await self._let_go(call)

    async def _let_go(self, call: FleetCall) -> list[int]:
        here = [index for index in range(len(self.fleet.engines)) if index not in self.fleet.gone.keys() | self.fleet.leaving]
        chosen = call.engines or here[::-1][: call.count]
        if not call.ends and (absent := sorted(set(chosen) - set(here))):
            raise Refused(f"engine {absent[0]}: there is none; there are {', '.join(map(str, here))}")
        if (last := self.fleet.serving or set(here)) <= set(chosen):
            raise Refused(f"one engine at least must go on serving, and engine {', '.join(map(str, sorted(last)))} would be gone")
        why = "its launcher ends" if call.ends else "by command"
        timeout_s = self.plan.config.timeouts.weights_s
        await asyncio.gather(*(self.fleet.leave(index, why, timeout_s) for index in chosen))
        return list(chosen)

    def _states(self, engines: Iterable[int]) -> list[EngineState]:
        fleet = self.fleet
        return [EngineState(i, fleet.engines[i].url, fleet.describe(i), i in fleet.serving, i in fleet.gone) for i in engines]

    async def watch(self) -> None:
        """Tells launchers which engines have left, and gives up lost ones that nobody will start again. Runs until cancelled."""
        noted: set[int] = set()
        while True:
            silence_s = self.plan.config.timeouts.silence_s
            for index in [index for index in self.fleet.lost if index in self._heard]:
                dropped = self.plan.config.generator.on_failure == "drop" and index not in self.fleet.joining
                if dropped or time.monotonic() - self._heard[index] > silence_s:
                    why = "it was lost" if dropped else f"its launcher has given no sign of life for {silence_s:.0f} s"
                    await self.fleet.leave(index, why, 0)
            for index in self.fleet.gone.keys() - noted:
                note_departure(Path(self.rendezvous.key_file).parent, f"{self.fleet.name}.{index}")
                noted.add(index)
            await asyncio.sleep(LOOK_S)
