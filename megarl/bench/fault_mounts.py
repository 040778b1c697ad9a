"""File systems of a campaign's own, small enough to be filled: the shared memory of its run, and its run directory.

They are mounted in a mount namespace of this process, which its children share: nobody else sees them, and they are gone with the last
of them. Root alone may do that; elsewhere the kinds of faults that need it are left out, and the campaign says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_BYTES, RUN_DIR_BYTES = 256 << 20, 512 << 20
_CLONE_NEWNS = 0x00020000  # sched.h
_FILLER = "filler"


def small_file_systems(run_dir: Path) -> bool:
    """Mounts them. False where that is not allowed; then nothing is mounted."""
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0 or libc.unshare(_CLONE_NEWNS) != 0:
        return False
    run_dir.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    for where, size in ((SHARED_MEMORY, SHARED_MEMORY_BYTES), (run_dir, RUN_DIR_BYTES)):
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=1777", "tmpfs", str(where)], check=True)
    return True


def fill(file_system: Path, left_bytes: int = 0) -> None:
    """Leaves `left_bytes` free; again, where some of it has been freed meanwhile."""
    free = os.statvfs(file_system)
    with open(file_system / _FILLER, "ab") as file, contextlib.suppress(OSError):  # somebody else took the room first
        os.posix_fallocate(file.fileno(), file.tell(), max(1, free.f_bavail * free.f_frsize - left_bytes))


def empty(file_system: Path) -> None:
    (file_system / _FILLER).unlink(missing_ok=True)
