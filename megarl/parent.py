"""Processes that end with the one that has started them, also when that is killed outright and cannot end its children."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """The kernel kills this process when its parent ends. Raises SystemExit where the process `parent` is gone already: another one has
    taken over its children, and that may itself be process 1, of a container."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(f"process {parent}, which has started this one, is gone")
