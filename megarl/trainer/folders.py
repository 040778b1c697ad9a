"""Folders that appear complete or not at all, written by all ranks together on a shared file system."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException


class WriteError(RuntimeError):
    """A folder could not be written, and is not there. Others that were there before still are."""


@contextlib.contextmanager
def written_together(path: str | Path, size_bytes: int | None = None) -> Iterator[Path]:
    """Yields `path`.partial to write into, on every rank; renames it to `path` when every rank has left the block.

    Collective. A run that dies on the way leaves at most the .partial folder, which the next attempt replaces, and never
    touches what lies at `path`. A folder already at `path` is replaced by two renames.

    Raises WriteError on a rank that cannot write (a full disk), after removing what is half-written; `size_bytes`, all that is to be
    written, is for its message.
    """
    path = Path(path)
    partial, old = path.with_name(path.name + ".partial"), path.with_name(path.name + ".old")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    free_bytes = shutil.disk_usage(partial).free
    try:
        yield partial
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)  # never to be taken for whole; and its bytes may be what is lacking
        if isinstance(error, (OSError, CheckpointException)):
            size = f"of {size_bytes} bytes " if size_bytes is not None else ""
            raise WriteError(f"{path} {size}could not be written; {free_bytes} bytes were free there before: {reason(error)}") from error
        raise
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


def reason(error: BaseException) -> str:
    """In a line. Of a collective save or load, rank 0 knows what went wrong on every rank."""
    if not isinstance(error, CheckpointException):
        return str(error) or repr(error)
    failures = [f"rank {rank}: {_plain(failure)}" for rank, (failure, _) in error.failures.items()]
    return "; ".join(failures) or "another rank failed, and told rank 0 why"


def _plain(failure: BaseException) -> str:
    """Torch hides the error of the file system when a write is cut short, and reports its own surprise about it."""
    text = str(failure) or repr(failure)
    return f"a file was cut short, as by a full disk or a quota ({text})" if "unexpected pos" in text else text


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
