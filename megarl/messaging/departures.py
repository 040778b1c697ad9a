"""Engines that have left a run for good, as their launchers learn of it: by files in the run's launch folder, which all of them see."""

from __future__ import annotations

import contextlib
import math
import os
import time
from pathlib import Path

_PREFIX = "left."
LOOK_S = 0.5


def note_departure(folder: Path, engine: str) -> None:
    """Notes that nothing needs the processes of `engine` (engine.3) any more."""
    (folder / f"{_PREFIX}{engine}").touch()


class Departures:
    """What has been noted in `folder`."""

    def __init__(self, folder: Path):
        self._folder, self._found = folder, frozenset[str]()
        self._looked_at = -math.inf

    def __contains__(self, process: str) -> bool:
        """Whether the engine that `process` (engine.3, or its part engine.3.1) belongs to has left, at most LOOK_S ago."""
        if (now := time.monotonic()) - self._looked_at >= LOOK_S:
            self._looked_at = now
            with contextlib.suppress(OSError):  # the folder goes with the run; a file server may be away for a while
                self._found = frozenset(name.removeprefix(_PREFIX) for name in os.listdir(self._folder) if name.startswith(_PREFIX))
        return ".".join(process.split(".")[:2]) in self._found
