"""Writes the engines' lines of the live display, which the generator does for them: they know nothing of the run."""

from __future__ import annotations

import asyncio
from pathlib import Path

from megarl.generator.fleet import Fleet
from megarl.observe.status import StatusBoard

EVERY_S = 0.5


async def show_engines(fleet: Fleet, run_dir: Path) -> None:
    """Updates the lines until its task is cancelled."""
    boards = [StatusBoard(run_dir, f"{fleet.name}.{index}") for index in range(len(fleet.engines))]
    while True:
        for index, board in enumerate(boards):
            if (text := fleet.describe(index)) != board.text:
                board.set(text)
        await asyncio.sleep(EVERY_S)
