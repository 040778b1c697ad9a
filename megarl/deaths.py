"""Why a process ended, as far as its host can tell."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
KERNEL_COUNTS = Path("/proc/vmstat")
LITTLE_BYTES = 16 << 20  # as good as full
MIB = 1 << 20


def how(code: int) -> str:
    """`code` as subprocess and multiprocessing give it; above 128, as a shell would: a signal has ended one of its own processes."""
    if code < 0:
        return f"was killed by {_name(-code)}"
    if code > 128 and _name(code - 128):
        return f"exited with status {code}: one of its processes was killed by {_name(code - 128)}"
    return f"exited with status {code}"


def ended_for_memory() -> int:
    """How many processes the kernel has ended for lack of memory, of the host or of a control group, since the host started; 0 where
    it does not count."""
    for line in KERNEL_COUNTS.read_text().splitlines() if KERNEL_COUNTS.exists() else ():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return 0


def cause(code: int, ended_before: int) -> str:
    """Why a process ended with `code` at whose start `ended_for_memory` gave `ended_before`; empty where nothing is known."""
    number = -code if code < 0 else code - 128
    found = []
    if number == signal.SIGKILL and (ended := ended_for_memory() - ended_before) > 0:
        memory = psutil.virtual_memory()
        room = f"{memory.available // MIB} of {memory.total // MIB} MiB are free now"
        found.append(f"the kernel has ended {ended} of this host's processes for lack of memory meanwhile; {room}")
    if SHARED_MEMORY.is_dir():
        disk = shutil.disk_usage(SHARED_MEMORY)
        if disk.free < LITTLE_BYTES or number == signal.SIGBUS:
            what = "full" if disk.free < LITTLE_BYTES else "the likely place, if memory that is mapped there had no room"
            found.append(f"{SHARED_MEMORY} is {what}: {disk.free // MIB} of {disk.total // MIB} MiB are free")
    return "; ".join(found)


def _name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else ""
