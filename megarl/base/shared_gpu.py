"""A GPU that a trainer rank and an engine's rank share, each in a process of its own
(cluster.share_gpus).

The trainer takes its planned peak from the driver before the engine measures what is free. torch's
allocator keeps that memory for later.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

from megarl.config.errors import RunError

# Environment variables, which only processes of a run on shared GPUs have.
SHARES = "MEGARL_SHARES_GPU"  # of both sides: 1
# of a trainer rank: planned bytes on a GPU without context and libraries
PEAK_BYTES = "MEGARL_TRAINER_PEAK_BYTES"
# of a trainer rank: the file that it makes when it has taken its peak
TAKEN = "MEGARL_TRAINER_TAKEN"
AFTER = "MEGARL_ENGINE_AFTER"  # of an engine: the TAKEN files of this node's trainer ranks
POLL_S = 0.1
GIB = 2**30


def taken_file(folder: Path, rank: int) -> Path:
    return folder / f"trainer.{rank}.taken"


def for_trainer(folder: Path, rank: int, peak_bytes: float) -> dict[str, str]:
    """The environment of a trainer rank. `folder`: the launch's folder on this node's own disk."""
    return {SHARES: "1", PEAK_BYTES: str(int(peak_bytes)), TAKEN: str(taken_file(folder, rank))}


def for_engine(folder: Path, trainer_ranks: Iterable[int]) -> dict[str, str]:
    """The environment of an engine.

    SGLang's own check would refuse GPUs whose trainer ranks, such as pipeline stages, differ in
    size.
    """
    files = os.pathsep.join(str(taken_file(folder, rank)) for rank in trainer_ranks)
    return {SHARES: "1", AFTER: files, "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}


def take_peak() -> None:
    """A trainer rank calls it when model and optimizer are there.

    Takes what is missing from the planned peak, and lets the engine start.

    Raises RunError if the GPU has too little.
    """
    if TAKEN not in os.environ:
        return
    import torch

    if torch.cuda.is_available():
        _reserve(int(os.environ[PEAK_BYTES]))
    Path(os.environ[TAKEN]).touch()


def _reserve(peak_bytes: int) -> None:
    import torch

    torch.cuda.empty_cache()  # pieces left by loading, too small for a step
    missing = peak_bytes - torch.cuda.memory_reserved()
    if missing <= 0:
        return
    try:
        # freed at once: the allocator keeps it, and cuts it as needed
        torch.empty(missing, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info()
        raise RunError(
            f"the trainer is planned to take {peak_bytes / GIB:.1f} GiB, {missing / GIB:.1f} "
            f"more than it has now, but the GPU has {total / GIB:.1f} GiB, of which "
            f"{free / GIB:.1f} are free: is cluster.gpu right, and does anything else use this GPU?"
        ) from error


def await_trainers() -> None:
    """An engine calls it before it uses the GPU. An engine that is started again does not wait.

    It waits for as long as the launcher waits for the engine (generator.startup_timeout_s); its log
    names the trainer ranks.
    """
    files = [Path(file) for file in os.environ.get(AFTER, "").split(os.pathsep) if file]
    late = [file.stem for file in files if not file.exists()]
    if late:
        print(
            f"waiting until {', '.join(late)} took the planned memory of the shared GPU", flush=True
        )
    while not all(file.exists() for file in files):
        time.sleep(POLL_S)


def high_water_bytes(of_tensors: bool = False) -> int:
    """The most memory that this process has held: on a GPU by torch, without context and libraries;
    otherwise of the host. `of_tensors`: without what torch's allocator holds in reserve, as after
    `take_peak`.
    """
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() if of_tensors else torch.cuda.max_memory_reserved()
    match = re.search(
        r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE
    )
    return 1024 * int(match[1]) if match else 0


def card_bytes() -> int:
    """The bytes of this process's GPU that are in use, by all processes; 0 without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free
