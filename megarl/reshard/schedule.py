"""A reshard map in the order it is carried out: batches per pair of ranks, wave by wave through the layers.

A *wave* is a run of tensors that follow each other in the forward pass, the same on every rank. A *batch* is what one rank
sends to one other in one wave, as joined writes. Every rank works out only its own batches, and both ends of a batch arrive at
the same one. Layers go in forward order; within a wave every sender starts with a receiver of its own.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from megarl.models.parameters import LAYER
from megarl.reshard.kinds import ITEM_BYTES
from megarl.reshard.map import Copy, ReshardMap

DIRECT, PACKED = "direct", "packed"
# A run shorter than this costs a NIC more in work requests than in bytes (a 400 Gb/s NIC moves 8 KiB in 160 ns, about one request).
DIRECT_RUN_BYTES = 8 << 10
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


def run_bytes(write: Copy, destination_shape: tuple[int, ...]) -> int:
    """Bytes of the write's longest contiguous run in the destination tensor (and at least one element)."""
    elements = 1
    for extent, whole in zip(reversed(write.destination_box.shape), reversed(destination_shape)):
        elements *= extent
        if extent != whole:
            break
    return elements * ITEM_BYTES[write.dtype]


def method(write: Copy, destination_shape: tuple[int, ...]) -> str:
    """How a write should reach the destination's memory.

    DIRECT: it is contiguous there, or its runs are of DIRECT_RUN_BYTES and more: straight into the tensor, an operation per run
    or one strided operation. PACKED: shorter runs: as one contiguous tile into a staging buffer, scattered there by a kernel.
    """
    run = run_bytes(write, destination_shape)
    return DIRECT if run >= min(write.bytes, DIRECT_RUN_BYTES) else PACKED


def waves(map: ReshardMap, wave_bytes: int = DEFAULT_WAVE_BYTES) -> tuple[int, ...]:
    """Wave of each depth (see Copy.depth): depths are put together until a receiver gets `wave_bytes` in one."""
    layout = map.destination
    sizes = [0] * (layout.num_layers + 2)
    for kind in layout.kinds:
        size = max(math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype] for tensor in kind.shards)
        for instance in range(kind.instances if kind.place == LAYER else 1):
            sizes[layout.depth(kind, instance)] += size
    result, wave, filled = [], 0, 0
    for size in sizes:
        if filled and filled + size > wave_bytes:
            wave, filled = wave + 1, 0
        result.append(wave)
        filled += size
    return tuple(result)


def batches_from(map: ReshardMap, rank: int, wave_bytes: int = DEFAULT_WAVE_BYTES) -> tuple[Batch, ...]:
    """What source rank `rank` sends, in the order it sends."""
    own = rank * map.destination.world_size // map.source.world_size
    receivers = map.destination.world_size
    groups: dict[tuple[int, int], list[Copy]] = defaultdict(list)
    wave_of = waves(map, wave_bytes)
    for write in map.writes_from(rank):
        groups[wave_of[write.depth], (write.destination_rank - own) % receivers].append(write)
    return _batches(groups)


def batches_to(map: ReshardMap, rank: int, wave_bytes: int = DEFAULT_WAVE_BYTES) -> tuple[Batch, ...]:
    """What destination rank `rank` receives, wave by wave."""
    groups: dict[tuple[int, int], list[Copy]] = defaultdict(list)
    wave_of = waves(map, wave_bytes)
    for write in map.writes_to(rank):
        groups[wave_of[write.depth], write.source_rank].append(write)
    return _batches(groups)


def _batches(groups: dict[tuple[int, int], list[Copy]]) -> tuple[Batch, ...]:
    """Groups by wave and place of the peer within it, each in forward order."""
    ordered = [(wave, tuple(groups[wave, peer])) for wave, peer in sorted(groups)]
    return tuple([Batch(wave, writes[0].source_rank, writes[0].destination_rank, writes) for wave, writes in ordered])
