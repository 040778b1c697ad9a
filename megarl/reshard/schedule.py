"""The schedule of a reshard map: batches per pair of ranks, wave by wave through the layers.

A *wave* is a run of consecutive tensors of the forward pass, the same on every rank. A *batch* has
the joined writes from one rank to another in one wave. Every rank computes only its own batches,
and both ends of a batch get the same result. Layers go in forward order. Within a wave, each sender
starts with a different receiver.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np
from msgspec import Struct

from megarl.base.geometry import Box
from megarl.reshard.layout import ITEM_BYTES
from megarl.reshard.map import Copy, ReshardMap, copies_received, put_received, put_sent
from megarl.reshard.template import ZEROS, TemplateRow

# The shortest contiguous run of destination memory that is worth its own message. Measured with
# Mooncake over TCP (docs/benchmarks.md): rows of 64 KiB take twice as long one by one as packed and
# spread. Rows of 128 KiB take equally long either way, and longer rows are faster one by one.
SHORTEST_RUN_BYTES = 128 << 10
# large enough for gloo and RDMA to reach their rate, small enough to stream layers
DEFAULT_WAVE_BYTES = 64 << 20
# of a sender's processor for each write (python tests/benchmarks writes); the next are prepared while
# others are under way
WRITE_S = 15e-6
_Writes = dict[tuple[int, int], list[Copy]]  # (depth, peer) -> writes


class WriteBatch(Struct, frozen=True, gc=False):
    """All writes of one wave from one rank to another, in forward order."""

    wave: int
    source_rank: int
    destination_rank: int
    writes: tuple[Copy, ...]

    @property
    def bytes(self) -> int:
        return sum(write.bytes for write in self.writes)


def run_bytes(box: Box, shape: Sequence[int], item_bytes: int) -> int:
    """The bytes of each contiguous run of a box, in a contiguous tensor of `shape`."""
    elements = 1
    for extent, tensor_extent in zip(reversed(box.shape), reversed(shape)):
        elements *= extent
        if extent != tensor_extent:
            break
    return elements * item_bytes


def lands(box: Box, shape: Sequence[int], item_bytes: int) -> bool:
    """Whether a box of a destination tensor lands: it is sent packed, as one contiguous piece that
    the receiver spreads.

    Both sides use the same rule. A box lands if it would otherwise be several messages of less than
    SHORTEST_RUN_BYTES. All other boxes are written directly to their places, with one message per
    contiguous run.
    """
    run = run_bytes(box, shape, item_bytes)
    return run < SHORTEST_RUN_BYTES and run < box.numel * item_bytes


def landing_rows(map: ReshardMap) -> tuple[TemplateRow, ...]:
    """The rows whose copies land: all of a row's do, or none."""
    return tuple(row for row in map.write_rows if lands(*written_memory(map, row)))


def landings(map: ReshardMap, rank: int, rows: tuple[TemplateRow, ...] | None = None) -> list[Copy]:
    """The copies to destination rank `rank` whose boxes land.

    `rows`: the map's `landing_rows`, if a caller asks for many ranks.
    """
    return copies_received(map.turns, rank, landing_rows(map) if rows is None else rows)


def written_memory(map: ReshardMap, row: TemplateRow) -> tuple[Box, tuple[int, ...], int]:
    """(a written box of the row, shape of its tensor, bytes of an element)."""
    tensor = map.destination.kinds[row.kind].shards[row.shard]
    box = row.box
    if tensor.experts is not None and row.transform != ZEROS:  # each expert is written separately
        box = box.entry(0)
    return box, tensor.shape, ITEM_BYTES[tensor.dtype]


def messages(box: Box, shape: Sequence[int], item_bytes: int) -> int:
    """The number of messages of a one-sided transport for a box: one if it lands, otherwise one per
    contiguous run.
    """
    if lands(box, shape, item_bytes):
        return 1
    return box.numel * item_bytes // run_bytes(box, shape, item_bytes)


def depth_bytes(map: ReshardMap) -> list[int]:
    """The most bytes that a receiver gets at each depth (see Copy.depth)."""
    layout = map.destination
    sizes = np.zeros(
        (1 + max(kind.group for kind in layout.kinds), layout.num_layers + 2), dtype=np.int64
    )
    for kind in layout.kinds:
        depths = [layout.depth(kind, instance) for instance in range(kind.instances)]
        sizes[kind.group, depths] += max(tensor.bytes for tensor in kind.shards)
    return sizes.max(axis=0).tolist()


def waves(map: ReshardMap, wave_bytes: int = DEFAULT_WAVE_BYTES) -> tuple[int, ...]:
    """The wave of each depth. Depths share a wave until a receiver gets `wave_bytes` in it."""
    result = []
    wave = 0
    filled = 0
    for size in depth_bytes(map):
        if filled and filled + size > wave_bytes:
            wave += 1
            filled = 0
        result.append(wave)
        filled += size
    return tuple(result)


def batches_from(
    map: ReshardMap, rank: int, wave_bytes: int = DEFAULT_WAVE_BYTES
) -> tuple[WriteBatch, ...]:
    """The batches that source rank `rank` sends, in sending order."""
    writes: _Writes = defaultdict(list)
    put_sent(
        map.turns, rank, map.write_rows, lambda depth, sender, receiver: writes[depth, receiver]
    )
    receivers = map.destination.world_size
    return _batches(
        writes, waves(map, wave_bytes), rank * receivers // map.source.world_size, receivers
    )


def scheduled_writes(map: ReshardMap, rank: int) -> list[Copy]:
    """The writes of `batches_from`, in the same order."""
    return [write for batch in batches_from(map, rank) for write in batch.writes]


def batches_to(
    map: ReshardMap, rank: int, wave_bytes: int = DEFAULT_WAVE_BYTES
) -> tuple[WriteBatch, ...]:
    """The batches that destination rank `rank` receives, wave by wave."""
    writes: _Writes = defaultdict(list)
    put_received(
        map.turns, rank, map.write_rows, lambda depth, sender, receiver: writes[depth, sender]
    )
    return _batches(writes, waves(map, wave_bytes), 0, map.source.world_size)


def _batches(
    writes: _Writes, wave_of: Sequence[int], first: int, peers: int
) -> tuple[WriteBatch, ...]:
    """The batches wave by wave.

    Within a wave they go around the `peers` from peer `first` on. Each batch goes depth by depth.
    """
    ordered = sorted(
        [(wave_of[depth], (peer - first) % peers, depth, peer) for depth, peer in writes]
    )
    batches = []
    for (wave, _), entries in groupby(ordered, key=itemgetter(0, 1)):
        batch_writes: list[Copy] = []
        for _, _, depth, peer in entries:
            batch_writes += writes[depth, peer]
        first_write = batch_writes[0]
        batches.append(
            WriteBatch(
                wave=wave,
                source_rank=first_write.source_rank,
                destination_rank=first_write.destination_rank,
                writes=tuple(batch_writes),
            )
        )
    return tuple(batches)
