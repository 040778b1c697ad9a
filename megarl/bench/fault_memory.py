"""Faults of an engine's memory: bits that it computes with are changed from outside while it serves."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from pathlib import Path
from random import Random

import psutil

from megarl.bench.fault_run import ENGINES, FaultRun
from megarl.models import ModelSpec, load_spec

WEIGHTS = "memfd:megarl-weights"  # the file that holds an engine's parameters (megarl/weight_sync/transports/shared_memory.py)
POSITION = 3  # the row of the rotary cache that is searched for


def parameter_changed(run: FaultRun, random: Random) -> dict[str, str]:
    """Flips a bit in the first half of the parameters' file: the end of the file is padding, which no parameter uses."""
    process = _worker(run.engine(random.randrange(ENGINES)))
    start, end = next(_regions(process, WEIGHTS))
    _flip(process, start + random.randrange((end - start) // 2) // 4 * 4)
    return {}


def rotary_changed(run: FaultRun, random: Random) -> dict[str, str]:
    process = _worker(run.engine(random.randrange(ENGINES)))
    row = _rotary_row(load_spec(run.model))
    found = [address for region in _regions(process, "") for address in _occurrences(process, *region, row)]
    if not found:
        raise RuntimeError("the engine's rotary cache was not found in its memory")
    for address in found:  # all, since one may be a freed copy
        _flip(process, address)
    return {}


def _rotary_row(model: ModelSpec) -> bytes:
    """The beginning of row POSITION: cos(position / theta^(2i/d)), computed in float32 as SGLang does."""
    import torch  # not at the top: `megarl bench --help` does without

    frequencies = 1.0 / (model.rope_theta ** (torch.arange(0, model.head_dim, 2, dtype=torch.float32) / model.head_dim))
    row = (torch.arange(POSITION + 1, dtype=torch.float32)[:, None] * frequencies)[POSITION].cos()
    return struct.pack(f"{len(row)}f", *row.tolist())


def _worker(engine: psutil.Process) -> psutil.Process:
    """The process that holds the parameters."""
    return next(child for child in engine.children(recursive=True) if any(_regions(child, WEIGHTS)))


def _regions(process: psutil.Process, name: str) -> Iterator[tuple[int, int]]:
    """First and last addresses of writable mappings of files whose name contains `name`; if empty: of anonymous memory and the heap."""
    for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
        addresses, permissions, _, _, _, *path = line.split(maxsplit=5)
        if permissions.startswith("rw") and ((name in path[0]) if name and path else not name and (not path or path[0] == "[heap]")):
            first, last = addresses.split("-")
            yield int(first, 16), int(last, 16)


def _occurrences(process: psutil.Process, start: int, end: int, pattern: bytes) -> Iterator[int]:
    with open(f"/proc/{process.pid}/mem", "rb") as memory, contextlib.suppress(OSError):
        memory.seek(start)
        content, at = memory.read(end - start), -1
        while (at := content.find(pattern, at + 1)) >= 0:
            yield start + at


def _flip(process: psutil.Process, address: int) -> None:
    """Flips a bit that changes the value of a float32 or bfloat16 noticeably."""
    with open(f"/proc/{process.pid}/mem", "r+b", buffering=0) as memory:
        memory.seek(address + 2)
        (byte,) = memory.read(1)
        memory.seek(address + 2)
        memory.write(bytes([byte ^ 4]))
