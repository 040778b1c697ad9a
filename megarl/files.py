"""Files that other processes write, or will read: the end of a log, what is there whole or not at all, and what is nobody else's."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

_TRIED_BYTES = 4 << 10
_MOST_BYTES = 64 << 10  # logs of days may be larger than memory


def make_private_folder(path: Path) -> None:
    """One that this user alone can look into. Where it is there already it stays as it is: whoever made it has decided."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)


def write_whole(path: Path, text: str) -> None:
    """Writes by rename: if the process dies, the host loses power, or the disk is full, the previous content stays."""
    half = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(half, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        half.replace(path)
        sync_folder(path.parent)
    finally:
        half.unlink(missing_ok=True)


def write_problem(folder: Path) -> str:
    """Why nothing can be written to `folder`, which may have become full or read-only; empty if something can."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(_TRIED_BYTES))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def sync_folder(folder: Path) -> None:
    """So that names in it are as they are now also after its host has lost its power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def log_tail(path: Path, lines: int = 25) -> str:
    """Its last lines."""
    if not path.exists():
        return "(no log)"
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _MOST_BYTES))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
