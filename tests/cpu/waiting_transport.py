"""Transports that wait in the middle of an update, for tests of events at that moment."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from megarl.reshard.map import Copy
from megarl.weight_sync.transports.mooncake import MooncakeTransport
from megarl.weight_sync.transports.shared_memory import SharedMemoryTransport

# environment variable with the folder of the files ASK and REACHED
FOLDER = "WAITING_TRANSPORT_FOLDER"
ASK = "ask"
REACHED = "reached"
SECOND_LAYER = 2  # depth
DEADLINE_S = 60


def settings(transport: str = "WaitingTransport") -> list[str]:
    return [f"weights.transport=waiting_transport:{transport}"]


def wait_if_asked(rank: int, copy: Copy) -> None:
    """While the file ASK exists: before trainer rank 0 writes the second layer, it makes the file
    REACHED, and waits until ASK is deleted.
    """
    ask = Path(os.environ[FOLDER], ASK)
    if rank == 0 and copy.depth == SECOND_LAYER and ask.exists():
        ask.with_name(REACHED).touch()
        deadline = time.monotonic() + DEADLINE_S
        while ask.exists():
            assert time.monotonic() < deadline, f"{ask} is still there"
            time.sleep(0.01)


class WaitingTransport(SharedMemoryTransport):
    def write(self, copy: Copy, values: torch.Tensor) -> None:
        wait_if_asked(self._rank, copy)
        super().write(copy, values)


class WaitingMooncake(MooncakeTransport):
    def write(self, copy: Copy, values: torch.Tensor) -> None:
        wait_if_asked(self._rank, copy)
        super().write(copy, values)
