"""A folder under TMPDIR for this node's part of a launch, where its processes put sockets, stores and caches.

Only this user can look into it, and it goes with the launch. The folder of a killed launcher goes with the next launch on the node.
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
_LONGEST = 107 - len("/pymp-12345678/listener-12345678")  # bytes: the limit of a Unix socket's path, minus what multiprocessing adds


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Makes the folder on a disk of this node, since not every shared file system has sockets and locks."""
    base = Path(tempfile.gettempdir())
    if len(os.fsencode(base)) + len(f"/{_PREFIX}12345678") > _LONGEST:
        base = Path("/tmp")
    _remove_leftovers(base)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    with open(folder / f".{_LOCK}", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(lock.name, folder / _LOCK)  # now that the lock is held
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_leftovers(base: Path) -> None:
    """Removes the folders of this user's launchers that were killed: the kernel has released their locks."""
    for path in base.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # another user's, still held, or already gone
            if path.parent.lstat().st_uid == os.getuid():
                with open(path, "rb") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path.parent)
