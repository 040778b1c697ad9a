"""Writes the engines' lines of the live display and of the trace, which the generator does for them: they know nothing of the run."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from megarl.generator.fleet import Fleet
from megarl.observe.status import StatusBoard
from megarl.observe.trace import TraceWriter

EVERY_S = 0.5


async def show_engines(fleet: Fleet, run_dir: Path, trace: TraceWriter) -> None:
    """Updates the lines until its task is cancelled. An engine's track has a mark where it is lost, and how long it was away when it serves
    again; also where it joins and leaves; all within half a second."""
    away: dict[int, float] = {}  # since when
    left: set[int] = set()
    boards: list[StatusBoard] = []
    while True:
        boards += [StatusBoard(run_dir, f"{fleet.name}.{index}") for index in range(len(boards), len(fleet.engines))]
        for index, board in enumerate(boards):
            if (text := fleet.describe(index)) != board.text:
                board.set(text)
            track, now = f"{fleet.name}.{index}", time.perf_counter()
            if index in fleet.lost and index not in away:
                away[index] = now
                trace.mark("joins" if index in fleet.joining else "lost", track, why=fleet.lost[index])
            elif index in fleet.serving and index in away:
                trace.add("away", away.pop(index), now, track)
            elif index in fleet.gone and index not in left:
                left.add(index)
                away.pop(index, None)
                trace.mark("left", track, why=fleet.gone[index])
        await asyncio.sleep(EVERY_S)
