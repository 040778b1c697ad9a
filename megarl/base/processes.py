"""Processes of a host: why one ended, how it ends with its parent, and signs of life from a busy
one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
KERNEL_COUNTS = Path("/proc/vmstat")
LITTLE_BYTES = 16 << 20  # less free space than this counts as full
MIB = 1 << 20


def ending(code: int) -> str:
    """How a process ended, in words.

    `code`: as subprocess and multiprocessing give it. Above 128, a signal has killed a child
    process.
    """
    if code < 0:
        return f"was killed by {_name(-code)}"
    if code > 128 and _name(code - 128):
        return f"exited with status {code}: one of its processes was killed by {_name(code - 128)}"
    return f"exited with status {code}"


def ended_for_memory() -> int:
    """The number of processes that the kernel has killed for lack of memory, on the host or in a
    control group, since the host started. 0 if the kernel does not count them.
    """
    if not KERNEL_COUNTS.exists():
        return 0
    for line in KERNEL_COUNTS.read_text(encoding="utf-8").splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return 0


def cause(code: int, ended_before: int) -> str:
    """Why a process ended with `code`; empty if unknown.

    `ended_before`: `ended_for_memory()` when the process started.
    """
    number = -code if code < 0 else code - 128
    causes = []
    killed = ended_for_memory() - ended_before if number == signal.SIGKILL else 0
    if killed > 0:
        import psutil  # imported here, since the kit of `make gpu` uses this file without psutil

        memory = psutil.virtual_memory()
        causes.append(
            f"the kernel has ended {killed} of this host's processes for lack of memory "
            f"meanwhile; {memory.available // MIB} of {memory.total // MIB} MiB are free now"
        )
    if SHARED_MEMORY.is_dir():
        disk = shutil.disk_usage(SHARED_MEMORY)
        state = ""
        if disk.free < LITTLE_BYTES:
            state = "full"
        elif number == signal.SIGBUS:
            state = "the likely cause, if memory that is mapped there had no room"
        if state:
            room = f"{disk.free // MIB} of {disk.total // MIB} MiB are free"
            causes.append(f"{SHARED_MEMORY} is {state}: {room}")
    return "; ".join(causes)


def _name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else ""


def kill(children: Sequence[BaseProcess]) -> None:
    """Kills all `children`, and only then waits for each."""
    for child in children:
        child.kill()
    for child in children:
        child.join(10)


_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent ends.

    Raises SystemExit if the process `parent` is already gone, and its children have another parent,
    which may be process 1 of a container.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(f"process {parent}, which has started this one, is gone")


# a job's signals that only the launcher answers; Slurm may send them to all processes
FOR_LAUNCHER = (signal.SIGHUP, signal.SIGUSR2)


BEATS = "MEGARL_ENGINE_BEATS"  # environment variable: path of the file that the beats touch
BEAT_S = 1.0


@contextlib.contextmanager
def beating() -> Iterator[None]:
    """Touches the file every BEAT_S until the block ends.

    A shorter command never touches it, and neither does a stopped process.
    """
    file = os.environ.get(BEATS)
    stop = threading.Event()

    def beat(path: Path) -> None:
        while not stop.wait(BEAT_S):
            # the disk is full: then only the engine's answers count
            with contextlib.suppress(OSError):
                path.touch()

    if file:
        threading.Thread(target=beat, args=[Path(file)], name="beats", daemon=True).start()
    try:
        yield
    finally:
        stop.set()
