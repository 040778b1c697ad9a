"""Transports that fail in mid-transfer, as with a dying process, a faulty NIC or a racing writer.

Each is a real transport with a hook before each write. Select one with `weights.transport`:
faulty_transports:Hooked….
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace

import torch

from megarl.reshard.deltas import Changes
from megarl.reshard.map import Copy
from megarl.weight_sync.transports.base import GLOO, MOONCAKE, SHARED_MEMORY
from megarl.weight_sync.transports.gloo import GlooTransport
from megarl.weight_sync.transports.mooncake import MooncakeTransport
from megarl.weight_sync.transports.shared_memory import SharedMemoryTransport

FIRST_WRITES = 5  # of a rank, before the fault

# (trainer rank, its writes so far, copy, values) → values
Before = Callable[[int, int, Copy, torch.Tensor], torch.Tensor]

before_write: Before | None = None  # of this process; tests set it


def flip_one_bit(rank: int, writes: int, copy: Copy, values: torch.Tensor) -> torch.Tensor:
    """Flips a bit in rank 1's write of one tensor."""
    if rank == 1 and copy.destination_tensor == FLIPPED and copy.destination_rank == 1:
        values = values.clone()
        values.view(-1).view(torch.uint8)[9] ^= 4  # in a delta this is its first value
    return values


FLIPPED = "model.layers.1.mlp.gate_up_proj.weight"


def die(rank: int, writes: int, copy: Copy, values: torch.Tensor) -> torch.Tensor:
    if writes == FIRST_WRITES:
        os.kill(os.getpid(), signal.SIGKILL)
    return values


def die_in_a_delta(rank: int, writes: int, copy: Copy, values: torch.Tensor) -> torch.Tensor:
    if writes == -1:
        os.kill(os.getpid(), signal.SIGKILL)
    return values


class _Hooked:
    def __init__(self, rank: int, timeout_s: float):
        super().__init__(rank, timeout_s)
        self._writes = 0

    def write(self, copy: Copy, values: torch.Tensor) -> None:
        if before_write is not None:
            values = before_write(self._rank, self._writes, copy, values)
        self._writes += 1
        super().write(copy, values)

    def write_changes(self, rank: int, changes: Changes, version: int) -> None:
        """Calls `before_write` once, as write -1, with the delta's bytes as values.

        The box is FLIPPED's if that has changed, and else another changed one. With shared memory,
        the boxes before it are already written.
        """
        changed_places = [place for place, (_, delta) in enumerate(changes) if delta.changed]
        first_place = next(
            (place for place in changed_places if changes[place][0].destination_tensor == FLIPPED),
            changed_places[-1],
        )
        if isinstance(self, SharedMemoryTransport):
            super().write_changes(rank, changes[:first_place], version)
        copy, delta = changes[first_place]
        if before_write is not None:
            delta = replace(delta, body=before_write(self._rank, -1, copy, delta.body))
        super().write_changes(
            rank, [*changes[:first_place], (copy, delta), *changes[first_place + 1 :]], version
        )


class HookedSharedMemory(_Hooked, SharedMemoryTransport):
    pass


class HookedGloo(_Hooked, GlooTransport):
    pass


class HookedMooncake(_Hooked, MooncakeTransport):
    pass


HOOKED = {
    kind: f"faulty_transports:{transport.__name__}"
    for kind, transport in (
        (SHARED_MEMORY, HookedSharedMemory),
        (GLOO, HookedGloo),
        (MOONCAKE, HookedMooncake),
    )
}
