"""Faults of what a run stores: full file systems, and damaged checkpoints."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import psutil

from megarl.bench import fault_mounts
from megarl.bench.fault_run import ENGINES, STARTED_S, FaultRun, Inject
from megarl.plan.checkpoints import complete_checkpoints

LEFT_BYTES = 1 << 20  # left on a full disk: enough for logs and metrics, too little for a checkpoint


def full_disk(run: FaultRun, random: Random) -> dict[str, str]:
    """Keeps trainer rank 1 from writing files of more than 1 MiB, so no part of a checkpoint."""
    psutil.Process(run.trainer(1).pid).rlimit(psutil.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    return {}


def disk_filled(run: FaultRun, random: Random) -> dict[str, str]:
    """Fills the disk and keeps it full: else a run would go on with the space it frees by deleting all checkpoints but its newest."""
    deadline = time.monotonic() + STARTED_S
    while run.launcher.poll() is None and time.monotonic() < deadline:
        run.descendants()
        fault_mounts.fill(run.run_dir, LEFT_BYTES)
        time.sleep(0.05)
    return {}


def disk_emptied(run: FaultRun) -> None:
    fault_mounts.empty(run.run_dir)


def shared_memory_filled_before_the_start(run: FaultRun, random: Random) -> dict[str, str]:
    """A run on CPUs does not mind: its processes share anonymous memory, or files in a folder of the launch."""
    run.launcher.terminate()
    run.exit_status(STARTED_S)
    fault_mounts.fill(fault_mounts.SHARED_MEMORY)
    run.start()
    run.wait_steps(1)
    shared_memory_emptied(run)
    return {}


def shared_memory_filled(run: FaultRun, random: Random) -> dict[str, str]:
    """Running processes already have their memory, but an engine that dies cannot be started again until there is room."""
    index = random.randrange(ENGINES)
    fault_mounts.fill(fault_mounts.SHARED_MEMORY)
    run.engine(index).kill()
    run.wait_until(lambda: run.said(str(fault_mounts.SHARED_MEMORY)), "word of the full shared memory", STARTED_S)
    shared_memory_emptied(run)
    return {"engine": str(index)}


def shared_memory_emptied(run: FaultRun) -> None:
    fault_mounts.empty(fault_mounts.SHARED_MEMORY)


def checkpoint_file(files: str, harm: Callable[[Path, Random], None]) -> Inject:
    """Stops the run, harms a file of its newest checkpoint that matches `files`, each time another one, and starts the run on it."""

    def inject(run: FaultRun, random: Random) -> dict[str, str]:
        run.launcher.terminate()
        run.exit_status(STARTED_S)
        _step, folder = complete_checkpoints(run.run_dir)[-1]
        found = sorted(folder.glob(files))
        chosen = found[run.launches % len(found)]
        (run.folder / "damaged").write_text(str(chosen))
        shutil.copy(chosen, run.folder / "whole")
        harm(chosen, random)
        run.start()
        return {"folder": re.escape(folder.name), "file": re.escape(chosen.name)}

    return inject


def cut_short(file: Path, random: Random) -> None:
    os.truncate(file, random.randrange(file.stat().st_size))


def remove(file: Path, random: Random) -> None:
    file.unlink()


def flip_bit(file: Path, random: Random) -> None:
    content = bytearray(file.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    file.write_bytes(content)


def whole_again(run: FaultRun) -> None:
    if (run.folder / "whole").exists():
        shutil.move(run.folder / "whole", (run.folder / "damaged").read_text())
