"""How evenly senders could share the work at best, given the trainer's pipeline stages, whatever the schedule.

Only a rank that holds an element can send it. So the bytes that only one stage holds, divided by its ranks, are a lower bound on the
busiest sender.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from megarl.reshard.map import ReshardMap
from megarl.reshard.template import ZEROS


def sender_bound(map: ReshardMap) -> float:
    """A lower bound on the busiest sender's bytes, as a multiple of the mean sender's. Zeros for padding do not count."""
    sizes: dict[tuple, int] = defaultdict(int)  # bytes of one instance and replica, by the holders' kinds, whose ranks may send them
    total = 0
    for row in map.rows:
        target, held = map.destination.kinds[row.kind], tuple(sorted({holder.kind for holder in row.holders}))
        size = map.row_bytes(row) * target.replicas
        total += size * target.instances
        if row.transform != ZEROS:
            sizes[held] += size
    only: dict[frozenset[int], int] = defaultdict(int)  # bytes that only these ranks hold
    for held, size in sizes.items():
        kinds = [map.source.kinds[kind] for kind in held]
        for stages, instances in Counter(zip(*[kind.stages.tolist() for kind in kinds])).items():
            ranks = frozenset().union(*[kind.ranks[stage].ravel().tolist() for kind, stage in zip(kinds, stages)])
            only[ranks] += size * instances
    mean = total / map.source.world_size
    return max(1.0, *[size / len(ranks) / mean for ranks, size in only.items()])
