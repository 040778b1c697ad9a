"""A folder of this node's part of a launch, under TMPDIR: for the sockets, stores and caches that its processes put there.

This user alone can look into it, and it goes with the launch. One whose launcher was killed goes with the next launch on the node.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "megarl-"
_LOCK = "lock"
_LONGEST = 107 - len("/pymp-12345678/listener-12345678")  # bytes: of a Unix socket's path, less what multiprocessing's adds


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """On a disk of this node: sockets and locks are not for every file system that nodes share."""
    base = Path(tempfile.gettempdir())
    if len(os.fsencode(base)) + len(f"/{_PREFIX}12345678") > _LONGEST:
        base = Path("/tmp")
    _remove_leftovers(base)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    with open(folder / f".{_LOCK}", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(lock.name, folder / _LOCK)  # now that it is held
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_leftovers(base: Path) -> None:
    """Of launchers of this user that were killed: the kernel has taken their locks back."""
    for path in base.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # another's, held, or gone by now
            if path.parent.lstat().st_uid == os.getuid():
                with open(path, "rb") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path.parent)
