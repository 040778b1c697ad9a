"""Folders that appear complete or not at all, written by all ranks together on a shared file system."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist


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
