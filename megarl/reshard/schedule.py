"""A reshard map in the order it is carried out: batches per pair of ranks, wave by wave through the layers.

A *wave* is a run of tensors that follow each other in the forward pass, the same on every rank. A *batch* is what one rank
sends to one other in one wave, as joined writes. Every rank works out only its own batches, and both ends of a batch arrive at
the same one. Layers go in forward order; within a wave every sender starts with a receiver of its own.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Sequence

from megarl.models.parameters import LAYER
from megarl.reshard.box import Box
from megarl.reshard.kinds import ITEM_BYTES
from megarl.reshard.map import Copy, ReshardMap

# Of contiguous destination memory that is worth a message of its own. Measured over Mooncake's TCP (docs/benchmarks.md): rows of 64 KiB
# take twice as long one by one as packed and spread, rows of 128 KiB as long, longer ones less.
SHORTEST_RUN_BYTES = 128 << 10
DEFAULT_WAVE_BYTES = 64 << 20  # large enough for gloo and RDMA to reach their rate, small enough to stream layers


@dataclass(frozen=True, slots=True)
class Batch:
    """All writes of one wave from one rank to one other, in forward order."""

    wave: int
    source_rank: int
    destination_rank: int
    writes: tuple[Copy, ...]

    @property
    def bytes(self) -> int:
        return sum(write.bytes for write in self.writes)


def run_bytes(box: Box, shape: Sequence[int], item_bytes: int) -> int:
    """Bytes of each contiguous run of a box of a contiguous tensor of `shape`."""
    elements = 1
    for extent, whole in zip(reversed(box.shape), reversed(shape)):
        elements *= extent
        if extent != whole:
            break
    return elements * item_bytes


def lands(box: Box, shape: Sequence[int], item_bytes: int) -> bool:
    """Whether a box of a destination tensor travels packed, as one contiguous tile that the receiver spreads (landing memory).

    The rule, for both sides alike: packed is what would be several messages of less than SHORTEST_RUN_BYTES. All else goes straight to
    its place, a message per contiguous run.
    """
    run = run_bytes(box, shape, item_bytes)
    return run < SHORTEST_RUN_BYTES and run < box.numel * item_bytes


def messages(box: Box, shape: Sequence[int], item_bytes: int) -> int:
    """What a one-sided transport sends for a box: one per contiguous run, or one in all where it lands."""
    return 1 if lands(box, shape, item_bytes) else box.numel * item_bytes // run_bytes(box, shape, item_bytes)


def waves(map: ReshardMap, wave_bytes: int = DEFAULT_WAVE_BYTES) -> tuple[int, ...]:
    """Wave of each depth (see Copy.depth): depths are put together until a receiver gets `wave_bytes` in one."""
    layout = map.destination
    sizes = [0] * (layout.num_layers + 2)
    for kind in layout.kinds:
        size = max(math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype] for tensor in kind.shards)
        first = layout.depth(kind, 0)
        for depth in range(first, first + (kind.instances if kind.place == LAYER else 1)):
            sizes[depth] += size
    result, wave, filled = [], 0, 0
    for size in sizes:
        if filled and filled + size > wave_bytes:
            wave, filled = wave + 1, 0
        result.append(wave)
        filled += size
    return tuple(result)


def batches_from(map: ReshardMap, rank: int, wave_bytes: int = DEFAULT_WAVE_BYTES) -> tuple[Batch, ...]:
    """What source rank `rank` sends, in the order it sends."""
    receivers = map.destination.world_size
    own = rank * receivers // map.source.world_size
    groups: dict[tuple[int, int], list[Copy]] = defaultdict(list)
    wave_of = waves(map, wave_bytes)
    for write in map.writes_from(rank):
        groups[wave_of[write.depth], write.destination_rank].append(write)
    return _batches(groups, own, receivers)


def batches_to(map: ReshardMap, rank: int, wave_bytes: int = DEFAULT_WAVE_BYTES) -> tuple[Batch, ...]:
    """What destination rank `rank` receives, wave by wave."""
    groups: dict[tuple[int, int], list[Copy]] = defaultdict(list)
    wave_of = waves(map, wave_bytes)
    for write in map.writes_to(rank):
        groups[wave_of[write.depth], write.source_rank].append(write)
    return _batches(groups, 0, map.source.world_size)


def _batches(groups: dict[tuple[int, int], list[Copy]], first: int, peers: int) -> tuple[Batch, ...]:
    """Groups of a wave and a peer, each in forward order: wave by wave, within one from peer `first` on, around `peers`."""
    ordered = [(wave, tuple(groups[wave, peer])) for wave, peer in sorted(groups, key=lambda group: (group[0], (group[1] - first) % peers))]
    return tuple([Batch(wave, writes[0].source_rank, writes[0].destination_rank, writes) for wave, writes in ordered])
