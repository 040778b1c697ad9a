"""Folders that appear complete or not at all, written by all ranks together on a shared file system; where checkpoints lie."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

import torch.distributed as dist

STATE = "state.json"
PREFIX = "step-"


@contextlib.contextmanager
def written_together(path: str | Path) -> Iterator[Path]:
    """Yields `path`.partial to write into, on every rank; renames it to `path` when every rank has left the block.

    Collective. A run that dies on the way leaves at most the .partial folder, which the next attempt replaces, and never
    touches what lies at `path`. A folder already at `path` is replaced by two renames.
    """
    path = Path(path)
    partial, old = path.with_name(path.name + ".partial"), path.with_name(path.name + ".old")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    yield partial
    dist.barrier()
    if dist.get_rank() == 0:
        _sync(partial)
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
        partial.rename(path)
        _sync(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    dist.barrier()


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def checkpoint_path(folder: str | Path, step: int) -> Path:
    """Where the checkpoint taken after `step` optimizer steps lies."""
    return Path(folder) / f"{PREFIX}{step:08d}"


def latest_checkpoint(folder: str | Path) -> Optional[Path]:
    """The newest complete checkpoint in `folder`, or None."""
    found = _complete(Path(folder))
    return found[-1] if found else None


def prune_checkpoints(folder: str | Path, keep: int) -> None:
    """Removes all but the newest `keep` complete checkpoints. For one process to call, after a save has returned."""
    for path in _complete(Path(folder))[:-keep]:
        shutil.rmtree(path)


def _complete(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob(f"{PREFIX}*/{STATE}") if path.parent.name.removeprefix(PREFIX).isdigit())
