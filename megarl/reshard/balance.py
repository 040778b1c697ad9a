"""How evenly senders could share the work at best: what the source layout forces, whatever the schedule.

Only a rank that holds an element can send it. So for any set of ranks, the bytes that nobody outside of it holds, divided by its ranks,
are a lower bound on the busiest sender. The sets looked at: the holders of each stripe of a parameter, and whole pipeline stages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from msgspec import structs

from megarl.reshard.map import ReshardMap
from megarl.reshard.template import ZEROS, Holder, Row, stripes_of

Ranks = frozenset[int]


@dataclass(frozen=True)
class SenderBound:
    """Lower bounds on the busiest sender's bytes, as multiples of the mean sender's."""

    max_over_mean: float  # from all that the source layout says of who holds what
    of_stages: float  # from the sizes of the pipeline stages alone


def sender_bound(map: ReshardMap) -> SenderBound:
    """Zeros for padding are anyone's to send: they count in the mean alone."""
    only: dict[Ranks, int] = defaultdict(int)  # bytes that these ranks hold and no others
    total = 0
    for row, size in _stripes(map):
        target = map.destination.kinds[row.kind]
        total += size * target.instances * target.replicas
        if row.transform != ZEROS:
            for ranks, instances in _holding_ranks(map, row.holders):
                only[ranks] += size * instances * target.replicas
    stages = {frozenset(kind.ranks[stage].ravel().tolist()) for kind in map.source.kinds for stage in set(kind.stages.tolist())}
    for ranks in stages:
        only.setdefault(ranks, 0)
    floor = {ranks: size / len(ranks) for ranks, size in _within(only).items()}
    mean = total / map.source.world_size
    worst, worst_stage = max(floor.values()), max(floor[ranks] for ranks in stages)
    return SenderBound(max(1.0, worst / mean), max(1.0, worst_stage / mean))


def _stripes(map: ReshardMap) -> Iterator[tuple[Row, int]]:
    """Rows with all that hold their elements as holders, not only those the map lets send; equal ones as one, with their bytes."""
    stripes = stripes_of(map.source)
    sizes: dict[tuple, tuple[Row, int]] = {}
    for row in map.rows:
        known = row
        if row.transform != ZEROS:
            kind, held = map.source.kinds[row.holders[0].kind], row.holders[0]
            piece = next(p for p in kind.shards[held.shard].pieces if p.local.contains(held.held_box))
            known = structs.replace(row, holders=tuple(stripes[piece.logical_name, kind.layers][piece.logical]))
        key = row.kind, row.transform == ZEROS, tuple([(h.kind, h.shard) for h in known.holders])
        sizes[key] = known, sizes.get(key, (row, 0))[1] + map.row_bytes(row)
    return iter(sizes.values())


def _holding_ranks(map: ReshardMap, holders: tuple[Holder, ...]) -> Iterator[tuple[Ranks, int]]:
    """(everyone who holds an instance, how many instances they hold)"""
    kinds = [map.source.kinds[holder.kind] for holder in holders]
    counts: dict[tuple[int, ...], int] = defaultdict(int)
    for stages in zip(*[kind.stages.tolist() for kind in kinds]):
        counts[stages] += 1
    for stages, count in counts.items():
        ranks = [kind.ranks[stage, holder.shard] for kind, stage, holder in zip(kinds, stages, holders)]
        yield frozenset(np.concatenate(ranks).tolist()), count


def _within(only: dict[Ranks, int]) -> dict[Ranks, int]:
    """Per set of ranks, the bytes of all sets within it."""
    containing: dict[int, list[Ranks]] = defaultdict(list)
    for ranks in only:
        for rank in ranks:
            containing[rank].append(ranks)
    totals: dict[Ranks, int] = defaultdict(int)
    for ranks, size in only.items():
        for larger in containing[next(iter(ranks))]:
            if ranks <= larger:
                totals[larger] += size
    return totals
