"""A transport that loses a write from the second update on, as a broken link between two GPUs
would.
"""

from __future__ import annotations

import torch

from megarl.reshard.map import Copy
from megarl.weight_sync.transports.shared_memory import SharedMemoryTransport


class LosingTransport(SharedMemoryTransport):
    def __init__(self, rank: int, timeout_s: float):
        super().__init__(rank, timeout_s)
        self._updates = 0

    def write(self, copy: Copy, values: torch.Tensor) -> None:
        if self._updates == 0 or copy.destination_tensor != "model.norm.weight":
            super().write(copy, values)

    def fence(self) -> None:
        super().fence()
        self._updates += 1
