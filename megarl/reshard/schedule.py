"""A reshard map in the order it is carried out: batches per pair of ranks, wave by wave through the layers.

A *wave* is a run of tensors that follow each other in the forward pass, the same on every rank. A *batch* is what one rank
sends to one other in one wave, as joined writes. Every rank works out only its own batches, and both ends of a batch arrive at
the same one. Layers go in forward order; within a wave every sender starts with a receiver of its own. A *group* is a run of layers
between which engines may go on decoding (`weights.apply=in_flight`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Optional, Sequence

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


def depth_bytes(map: ReshardMap) -> list[int]:
    """The most bytes that a receiver gets at each depth (see Copy.depth)."""
    layout = map.destination
    sizes = [0] * (layout.num_layers + 2)
    for kind in layout.kinds:
        size = max(math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype] for tensor in kind.shards)
        first = layout.depth(kind, 0)
        for depth in range(first, first + (kind.instances if kind.place == LAYER else 1)):
            sizes[depth] += size
    return sizes


def waves(map: ReshardMap, wave_bytes: int = DEFAULT_WAVE_BYTES) -> tuple[int, ...]:
    """Wave of each depth: depths are put together until a receiver gets `wave_bytes` in one."""
    return _runs(depth_bytes(map), wave_bytes)


def groups(map: ReshardMap, group_bytes: Optional[int]) -> tuple[int, ...]:
    """Group of each depth, in which an update is applied: whole layers, put together until a receiver gets `group_bytes` in one.

    What comes before the first layer goes with it, and what comes after the last with that. None: all are one group. Equal on both
    sides of a map, for all engines of a run, and with relays.
    """
    before, *layers, after = depth_bytes(map)
    if group_bytes is None:
        return (0,) * (len(layers) + 2)
    layers[0] += before
    layers[-1] += after
    of_layers = _runs(layers, group_bytes)
    return (of_layers[0], *of_layers, of_layers[-1])


def _runs(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    """Number of the run that each of `sizes` belongs to: runs are of at most `most`, or of a single one."""
    result, run, filled = [], 0, 0
    for size in sizes:
        if filled and filled + size > most:
            run, filled = run + 1, 0
        result.append(run)
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


def writes_by_group(map: ReshardMap, rank: int, group_of: Sequence[int]) -> list[list[Copy]]:
    """What source rank `rank` sends in each group (`groups`), in the order it sends."""
    found: list[list[Copy]] = [[] for _ in range(group_of[-1] + 1)]
    for batch in batches_from(map, rank):
        for write in batch.writes:
            found[group_of[write.depth]].append(write)
    return found


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
