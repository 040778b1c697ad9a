"""Folders that appear complete or not at all, written by all ranks together on a shared file system."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from megarl.config.errors import RunError
from megarl.files import sync_folder

T = TypeVar("T")


class WriteError(RunError):
    """A folder could not be written, and does not exist. Those that existed before still do."""


class RanksFailed(RunError):
    """Some ranks failed at a common task. The message says which and why, and is the same on every rank."""


def together(
    action: Callable[[], T],
    failures: tuple[type[Exception], ...] = (OSError, RuntimeError),
    raises: type[RuntimeError] = RanksFailed,
) -> T:
    """Runs `action` on every rank, and returns its result on this one. Collective; `action` itself must not be, so that one rank may fail.

    Raises `raises` on every rank if any of `failures` occurred on one.
    """
    failure: Exception | None = None
    results: list[T] = []  # one result, or none if it failed
    try:
        results.append(action())
    except failures as error:
        failure = error
    told: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, None if failure is None else str(failure) or repr(failure))
    problems = {text: rank for rank, text in reversed(list(enumerate(told))) if text is not None}
    if not problems:
        return results[0]
    alike = len(problems) == 1 and None not in told
    raise raises("; ".join(text if alike else f"rank {rank}: {text}" for text, rank in reversed(problems.items()))) from failure


@contextlib.contextmanager
def written_together(path: str | Path, size_bytes: int | None = None) -> Iterator[Path]:
    """Yields `path`.partial to write into, on every rank; renames it to `path` when every rank has left the block.

    Collective. A run that dies meanwhile leaves at most the .partial folder, which the next attempt replaces, and never changes what is at
    `path`. A folder already at `path` is replaced by two renames.

    Raises WriteError if the block raises OSError or RanksFailed (a full disk), after removing the partial folder; `size_bytes`, the size
    of everything to be written, is for its message. Steps at which single ranks may fail belong into `together`: otherwise the others
    would wait for them.
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
        shutil.rmtree(partial, ignore_errors=True)  # it must never be taken for whole, and its space may be needed
        if isinstance(error, (OSError, RanksFailed)):
            size = f"of {size_bytes} bytes " if size_bytes is not None else ""
            raise WriteError(f"{path} {size}could not be written; {free_bytes} bytes were free there before: {error}") from error
        raise
    dist.barrier()
    if dist.get_rank() == 0:
        sync_folder(partial)
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
        partial.rename(path)
        sync_folder(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    dist.barrier()
