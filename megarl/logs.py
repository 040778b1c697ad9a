"""The end of a process's log, for the message that says what became of the process."""

from __future__ import annotations

from pathlib import Path

_MOST_BYTES = 64 << 10  # logs of days may be larger than memory


def log_tail(path: Path, lines: int = 25) -> str:
    """Its last lines."""
    if not path.exists():
        return "(no log)"
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _MOST_BYTES))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
