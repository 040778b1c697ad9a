"""Folders that appear complete or not at all, written by all ranks together on a shared file system."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from megarl.config.errors import RunError
from megarl.files import sync_folder


class WriteError(RunError):
    """A folder could not be written, and does not exist. Those that existed before still do."""


class RanksFailed(RunError):
    """Some ranks failed at a common task. The message says which and why, and is the same on every rank."""


def together[T](
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


class Writing[T]:
    """A folder that all ranks write together; it appears at `path` when `finish` returns, and is complete then.

    Each rank calls `write` with the folder's provisional name, in a thread of its own if `beside`: then the caller goes on meanwhile, and
    `write` must not communicate, because the caller does. `finish` calls `conclude` on all ranks with the folder and what `write` returned.

    A run that dies meanwhile leaves at most a .partial folder, which the next attempt replaces, and never changes what is at `path`. A
    folder already at `path` is replaced by two renames. Creating a Writing, `written` and `finish` are collective.
    """

    def __init__(
        self,
        path: str | Path,
        write: Callable[[Path], T],
        conclude: Callable[[Path, T], None] = lambda folder, written: None,
        *,
        beside: bool,
        size_bytes: int | None = None,
    ):
        """`size_bytes`, the size of everything to be written, is for messages. Raises WriteError if the folder cannot be made."""
        self.path = Path(path)
        self._partial = self.path.with_name(self.path.name + ".partial")
        self._write, self._conclude, self._size_bytes = write, conclude, size_bytes
        self._result: list[T] = []  # one result, or none if it failed
        self._failure: BaseException | None = None
        try:
            together(self._make_partial)
        except RanksFailed as error:
            raise WriteError(f"{self.path} could not be written: {error}") from error
        self._free_bytes = shutil.disk_usage(self._partial).free
        # A daemon: a run that fails does not wait for what will never be complete.
        self._thread = threading.Thread(target=self._run, name=f"writes {self.path.name}", daemon=True)
        if beside:
            self._thread.start()
        else:
            self._run()

    def written(self) -> bool:
        """Whether `finish` need not wait for the disk: all ranks have written, or failed to."""
        alive = [self._thread.is_alive()] * dist.get_world_size()
        dist.all_gather_object(alive, alive[0])
        return not any(alive)

    def finish(self) -> None:
        """Returns when the folder is complete and on the disk.

        Raises WriteError if any rank's `write` or `conclude` raised OSError or RuntimeError (a full disk), after removing the partial
        folder. Steps of `conclude` at which single ranks may fail belong into `together`: otherwise the others would wait for them.
        """
        if self._thread.ident is not None:
            self._thread.join()
        try:
            result = together(self._outcome)
            self._conclude(self._partial, result)
            dist.barrier()
            together(self._rename)
        except BaseException as error:
            shutil.rmtree(self._partial, ignore_errors=True)  # it must never be taken for whole, and its space may be needed
            if isinstance(error, (OSError, RanksFailed)):
                size = f"of {self._size_bytes} bytes " if self._size_bytes is not None else ""
                free = f"{self._free_bytes} bytes were free there before"
                raise WriteError(f"{self.path} {size}could not be written; {free}: {error}") from error
            raise

    def _make_partial(self) -> None:
        if dist.get_rank() == 0:
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial.mkdir(parents=True)

    def _run(self) -> None:
        try:
            self._result.append(self._write(self._partial))
        except BaseException as error:  # raised again by `finish`
            self._failure = error

    def _outcome(self) -> T:
        if self._failure is not None:
            raise self._failure
        return self._result[0]

    def _rename(self) -> None:
        if dist.get_rank() != 0:
            return
        old = self.path.with_name(self.path.name + ".old")
        sync_folder(self._partial)
        if self.path.exists():
            shutil.rmtree(old, ignore_errors=True)
            self.path.rename(old)
        self._partial.rename(self.path)
        sync_folder(self.path.parent)
        shutil.rmtree(old, ignore_errors=True)
