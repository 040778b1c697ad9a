"""A transport that corrupts one element of one write, as a faulty NIC or a racing writer would."""

from __future__ import annotations

import torch

from megarl.reshard.map import Copy
from megarl.weight_sync.transports.shared_memory import SharedMemoryTransport

TENSOR = "model.layers.1.mlp.gate_up_proj.weight"


class CorruptingTransport(SharedMemoryTransport):
    """Flips the lowest bit of one element of TENSOR that trainer rank 1 writes, in the second
    update.
    """

    def __init__(self, rank: int, timeout_s: float):
        super().__init__(rank, timeout_s)
        self._updates = 0

    def write(self, copy: Copy, values: torch.Tensor) -> None:
        if self._rank == 1 and self._updates == 1 and copy.destination_tensor == TENSOR:
            values = values.clone()
            values.view(torch.int32)[3, 5] ^= 1
        super().write(copy, values)

    def fence(self) -> None:
        super().fence()
        self._updates += 1
