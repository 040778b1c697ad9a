"""Fleets of fake engines, which answer when a test lets them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from loops import DEADLINE_S

import megarl.generator.engine_state
from megarl.generator.client import EngineUnreachable
from megarl.generator.completions import Completion
from megarl.generator.fleet import Fleet


@dataclass
class Engine:
    """An abort gets an answer that is cut three tokens short; `finish` gives all tokens."""

    url: str
    hung: bool = False
    is_fresh: bool = True
    # lengths of inputs, and versions
    requests: list[tuple[int, int | None]] = field(default_factory=list)
    closed: bool = False
    cut: asyncio.Event = field(default_factory=asyncio.Event)
    finish: asyncio.Event = field(default_factory=asyncio.Event)

    async def complete(self, inputs, samplings, version):
        self.requests.append((len(inputs[0]), version))
        waits = [asyncio.ensure_future(event.wait()) for event in (self.cut, self.finish)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if self.closed:
            raise EngineUnreachable(self.url, "closed")
        finished = self.finish.is_set()
        reason = "length" if finished else "abort"
        self.cut.clear()
        counts = [sampling.max_tokens - (0 if finished else 3) for sampling in samplings]
        return [
            Completion([7] * count, [-0.5] * count, [version] * count, reason) for count in counts
        ]

    async def abort_all(self, timeout_s):
        if self.hung:
            await asyncio.sleep(timeout_s * 2)
        self.cut.set()

    async def fresh(self):
        return self.is_fresh

    async def close(self):
        self.closed = True
        self.cut.set()


def numbers(engines: Iterable[megarl.generator.engine_state.Engine]) -> list[int]:
    return [engine.number for engine in engines]


def of(count: int, mode: str = "in_flight") -> tuple[Fleet, list[Engine]]:
    engines = [Engine(f"http://engine-{number}") for number in range(count)]
    fleet = Fleet(engines, mode, elastic=True)
    fleet.release(4)
    return fleet, engines


def run(body) -> None:
    asyncio.run(asyncio.wait_for(body(), DEADLINE_S))
