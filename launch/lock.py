"""Allows only one launch at a time of a command in a run's folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from megarl.config.errors import ConfigError

HELD = (errno.EACCES, errno.EAGAIN)
NOT_OFFERED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # the file system, or its mount, has no locks


@contextlib.contextmanager
def held(path: Path, refusal: str) -> Iterator[None]:
    """Holds the lock file `path` against every process of every host that shares its file system.

    It is a POSIX record lock, which children do not inherit, and which the kernel, or the file server if the host is gone, releases
    however its holder ends. Raises ConfigError if another process holds it: `refusal`, and who that is.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(path, "a+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            _not_locked(error, path, f"{refusal}, {file.read().strip() or 'by another launch'}; end it first")
        else:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S %Z')}\n")
            file.flush()
        yield


def is_held(path: Path) -> bool:
    """Whether a process, of whatever host, holds the lock file `path`. True too where the file system has no locks."""
    with open(path, "rb") as file:
        try:
            os.lockf(file.fileno(), os.F_TEST, 0)
        except OSError as error:
            if error.errno not in (*HELD, *NOT_OFFERED):
                raise
            return True
        return False


def _not_locked(error: OSError, path: Path, refusal: str) -> None:
    if error.errno in HELD:
        raise ConfigError(refusal) from None
    if error.errno not in NOT_OFFERED:
        raise error
    print(f"megarl: {path}: no locks on this file system; a second launch would not be noticed", file=sys.stderr, flush=True)
