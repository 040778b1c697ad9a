"""Files that other processes write, or will read: the end of a log, and what is there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

_MOST_BYTES = 64 << 10  # logs of days may be larger than memory


def write_whole(path: Path, text: str) -> None:
    """By rename: a process that dies over it, or a full disk, leaves what was there before."""
    half = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        half.write_text(text)
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)


def log_tail(path: Path, lines: int = 25) -> str:
    """Its last lines."""
    if not path.exists():
        return "(no log)"
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _MOST_BYTES))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
