"""Signs of life of an engine's worker that is at a command of a weight update, and so answers nothing (generator.health_s)."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

BEATS = "MEGARL_ENGINE_BEATS"  # environment: the file by which whoever watches the engine sees them
BEAT_S = 1.0


@contextlib.contextmanager
def beating() -> Iterator[None]:
    """Touches the file every BEAT_S until it is left: never for a command that is done sooner. A process that is stopped does not beat."""
    file, done = os.environ.get(BEATS), threading.Event()

    def beat(path: Path) -> None:
        while not done.wait(BEAT_S):
            with contextlib.suppress(OSError):  # a full disk: then what the engine answers must do
                path.touch()

    if file:
        threading.Thread(target=beat, args=[Path(file)], name="beats", daemon=True).start()
    try:
        yield
    finally:
        done.set()
