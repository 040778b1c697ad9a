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
    again; both within half a second."""
    away: dict[int, float] = {}  # since when
    boards: list[StatusBoard] = []
    while True:
        boards += [StatusBoard(run_dir, f"{fleet.name}.{index}") for index in range(len(boards), len(fleet.engines))]
        for index, board in enumerate(boards):
            if (text := fleet.describe(index)) != board.text:
                board.set(text)
            track, now = f"{fleet.name}.{index}", time.perf_counter()
            if index in fleet.lost and index not in away:
                away[index] = now
                trace.mark("lost", track, why=fleet.lost[index])
            elif index in fleet.serving and index in away:
                trace.add("away", away.pop(index), now, track)
        await asyncio.sleep(EVERY_S)
