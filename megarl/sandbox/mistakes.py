"""Shows an exception of a user's own function as its author wants to read it."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

_MOST_CHARS = 500  # limit of the exception's message, which may quote what a model wrote
_NOT_THEIRS = (str(Path(__file__).resolve().parents[1]), *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


def own_line(error: BaseException) -> str:
    """The innermost line outside libraries (file, line, function, statement), then the exception."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if not frame.filename.startswith((*_NOT_THEIRS, "<"))), frames[-1])
    message = str(error)[:_MOST_CHARS]
    return f"{frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line}\n{type(error).__name__}: {message}"
