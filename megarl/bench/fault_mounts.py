"""Small file systems that a campaign can fill: one for its run's shared memory, one for its run directory.

They are mounted in a mount namespace of this process and its children: nobody else sees them, and they vanish when the last of these
processes ends. Only root may do that; without root, the campaign leaves out the kinds of faults that need it, and says so.
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
    """Mounts them. Returns False, with nothing mounted, if that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0 or libc.unshare(_CLONE_NEWNS) != 0:
        return False
    run_dir.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    for where, size in ((SHARED_MEMORY, SHARED_MEMORY_BYTES), (run_dir, RUN_DIR_BYTES)):
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=1777", "tmpfs", str(where)], check=True)
    return True


def fill(file_system: Path, left_bytes: int = 0) -> None:
    """Fills the file system up to `left_bytes`; may be called again when space has been freed."""
    free = os.statvfs(file_system)
    with open(file_system / _FILLER, "ab") as file, contextlib.suppress(OSError):  # another process took the room first
        os.posix_fallocate(file.fileno(), file.tell(), max(1, free.f_bavail * free.f_frsize - left_bytes))


def empty(file_system: Path) -> None:
    (file_system / _FILLER).unlink(missing_ok=True)
