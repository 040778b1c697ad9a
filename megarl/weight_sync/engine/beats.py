"""Signs of life from a worker that is busy with a command of a weight update and so cannot answer (generator.health_s)."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

BEATS = "MEGARL_ENGINE_BEATS"  # environment variable: path of the file that the beats touch
BEAT_S = 1.0


@contextlib.contextmanager
def beating() -> Iterator[None]:
    """Touches the file every BEAT_S until the block ends, so a shorter command never touches it. A stopped process does not beat."""
    file, done = os.environ.get(BEATS), threading.Event()

    def beat(path: Path) -> None:
        while not done.wait(BEAT_S):
            with contextlib.suppress(OSError):  # a full disk: then only the engine's answers count
                path.touch()

    if file:
        threading.Thread(target=beat, args=[Path(file)], name="beats", daemon=True).start()
    try:
        yield
    finally:
        done.set()
