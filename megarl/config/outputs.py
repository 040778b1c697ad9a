"""Checks that a command can write its output, before it computes for minutes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

PICTURES = (".svg", ".png")


def file_problems(option: str, path: str, endings: Sequence[str] = ()) -> Iterator[str]:
    """Problems with writing a file at `path`, which may exist. `option` is the user's name for it, for the message."""
    if endings and not path.endswith(tuple(endings)):
        yield f"{option} {path}: must end in {' or '.join(endings)}"
    elif Path(path).is_dir():
        yield f"{option} {path}: is a folder, must be a file"
    elif not Path(path).parent.is_dir():
        yield f"{option} {path}: there is no folder {Path(path).parent}"
    elif not os.access(path if Path(path).exists() else Path(path).parent, os.W_OK):
        yield f"{option} {path}: may not be written"


def folder_problems(option: str, path: str) -> Iterator[str]:
    """Problems with writing a folder at `path`, and any missing folders above it."""
    there = next(folder for folder in (Path(path), *Path(path).absolute().parents) if folder.exists())
    if not there.is_dir():
        yield f"{option}{path}: {'is' if there == Path(path) else f'{there} is'} a file, must be a folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        yield f"{option}{path}: {there} may not be written to"


def new_folder_problems(option: str, path: str) -> Iterator[str]:
    """Like `folder_problems`, but nothing may exist at `path`, since an export replaces everything there."""
    if Path(path).is_dir() and any(Path(path).iterdir()):
        yield f"{option}{path}: is there already, and is not empty; remove it, or name another"
    else:
        yield from folder_problems(option, path)
