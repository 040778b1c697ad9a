"""The template of a reshard map: the join of two layouts, per parameter and pair of shards.

A row says: this box of shard t of a destination kind comes from that box of shard s of a source kind. It holds for every
layer and for every replica on both sides, so the number of rows depends on tensor parallelism alone. Which replica sends to
which is a closed form (`Row.candidate`), evaluated only when a rank's own list, or a total, is written out.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Iterable, Optional

import numpy as np

from megarl.reshard.box import Box, whole_box
from megarl.reshard.kinds import Kind, Layout

IDENTITY, CAST, ZEROS = "identity", "cast", "zeros"


@dataclass(frozen=True, slots=True)
class Holder:
    """A shard of a source kind that holds the elements, in `box`. For zeros only the sender matters: no box."""

    kind: int  # index into source.kinds
    shard: int
    box: Optional[Box]


@dataclass(frozen=True, slots=True)
class Row:
    """`box` of shard `shard` of destination kind `kind` comes from any one of `holders`.

    `fan` is the number of destination shards that the sending shard feeds with this kind, `index` this one's place among them.
    """

    kind: int  # index into destination.kinds
    shard: int
    box: Box
    holders: tuple[Holder, ...]
    transform: str  # IDENTITY | CAST | ZEROS
    fan: int = 1
    index: int = 0

    @property
    def route(self) -> tuple:
        """Rows of equal route have the same senders and receivers."""
        return self.kind, self.shard, tuple((h.kind, h.shard) for h in self.holders), self.fan, self.index

    def candidate(self, turn: np.ndarray, candidates: int) -> np.ndarray:
        """Which of the candidates sends at each turn (any shape).

        Turns go round robin, so each candidate serves every fed shard equally often, whatever the shards' sizes; in one turn
        the fed shards lie evenly spaced over the candidates, so that few turns already use all of them.
        """
        return (turn + self.index * candidates // self.fan) % candidates


def join(source: Layout, destination: Layout) -> tuple[Row, ...]:
    """All rows between two layouts. Raises ValueError when the source lacks a logical tensor or the layouts disagree on layers."""
    stripes = _stripes(source)
    rows: list[Row] = []
    for k, kind in enumerate(destination.kinds):
        found: list[Row] = []
        for t, tensor in enumerate(kind.shards):
            for piece in tensor.pieces:
                if piece.logical_name not in stripes:
                    raise ValueError(f"{destination.name} tensor {kind.name} holds {piece.logical_name}, which {source.name} does not")
                for logical, holders in stripes[piece.logical_name].items():
                    common = logical.intersect(piece.logical)
                    if common is None:
                        continue
                    chosen = _nearest(source, holders, t, len(kind.shards))
                    _same_instances(source.kinds[chosen[0].kind], kind)
                    dtype = source.kinds[chosen[0].kind].shards[chosen[0].shard].dtype
                    moved = tuple(Holder(h.kind, h.shard, common.move(logical, h.box)) for h in chosen)
                    box = common.move(piece.logical, piece.local)
                    found.append(Row(k, t, box, moved, IDENTITY if dtype == tensor.dtype else CAST))
        rows += found + _padding(source, kind, k, found)
    return _with_fan(rows)


def coalesce(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Rows whose boxes continue each other on both sides, between the same two ranks, become one row."""
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        groups[(row.route, row.transform)].append(row)
    merged: list[Row] = []
    for group in groups.values():
        group.sort(key=lambda row: row.box.start)
        current = group[0]
        for row in group[1:]:
            joined = _joined(current, row)
            if joined is None:
                merged.append(current)
            current = joined or row
        merged.append(current)
    return tuple(sorted(merged, key=lambda row: (row.kind, row.shard, row.box.start)))


def _stripes(source: Layout) -> dict[str, dict[Box, list[Holder]]]:
    """Logical name → logical box → everyone who holds exactly that box."""
    stripes: dict[str, dict[Box, list[Holder]]] = defaultdict(lambda: defaultdict(list))
    for k, kind in enumerate(source.kinds):
        for s, tensor in enumerate(kind.shards):
            for piece in tensor.pieces:
                stripes[piece.logical_name][piece.logical].append(Holder(k, s, piece.local))
    return stripes


def _nearest(source: Layout, holders: list[Holder], shard: int, shards: int) -> list[Holder]:
    """Of shards that hold the same elements, those that face destination shard `shard` of `shards`; per kind."""
    by_kind: dict[int, list[Holder]] = defaultdict(list)
    for holder in holders:
        by_kind[holder.kind].append(holder)
    chosen = []
    for group in by_kind.values():
        begin, end = shard * len(group) // shards, (shard + 1) * len(group) // shards
        chosen += group[begin : max(end, begin + 1)]
    return chosen


def _padding(source: Layout, kind: Kind, k: int, found: list[Row]) -> list[Row]:
    """Rows of zeros for what no piece covers. They travel with the largest row of their shard."""
    rows = []
    for t, tensor in enumerate(kind.shards):
        empty = [whole_box(tensor.shape)]
        for piece in tensor.pieces:
            empty = [rest for box in empty for rest in box.subtract(piece.local)]
        if not empty:
            continue
        own = [row for row in found if row.shard == t]
        if own:
            holders = max(own, key=lambda row: row.box.numel).holders
        else:  # all padding: the source shard that faces it
            first = found[0].holders[0]
            holders = (Holder(first.kind, t * len(source.kinds[first.kind].shards) // len(kind.shards), None),)
        rows += [Row(k, t, box, tuple(Holder(h.kind, h.shard, None) for h in holders), ZEROS) for box in empty]
    return rows


def _with_fan(rows: list[Row]) -> tuple[Row, ...]:
    fed: dict[tuple[int, int, int], set[int]] = defaultdict(set)
    for row in rows:
        fed[(row.kind, row.holders[0].kind, row.holders[0].shard)].add(row.shard)
    order = {key: sorted(shards) for key, shards in fed.items()}
    result = []
    for row in rows:
        peers = order[(row.kind, row.holders[0].kind, row.holders[0].shard)]
        result.append(replace(row, fan=len(peers), index=peers.index(row.shard)) if len(peers) > 1 else row)
    return tuple(result)


def _same_instances(source: Kind, destination: Kind) -> None:
    if source.place != destination.place and source.instances == destination.instances == 1:
        return  # a tied output layer: the same logical tensor at another place
    if source.place != destination.place or source.instances != destination.instances:
        raise ValueError(
            f"{source.name} has {source.instances} instances at place {source.place!r}, "
            f"{destination.name} {destination.instances} at {destination.place!r}"
        )


def _joined(a: Row, b: Row) -> Optional[Row]:
    target = a.box.join(b.box)
    if target is None:
        return None
    dim, box = target
    holders = []
    for x, y in zip(a.holders, b.holders):
        if x.box is None or y.box is None:
            holders.append(x)
            continue
        joined = x.box.join(y.box)
        if joined is None or joined[0] != dim:
            return None
        holders.append(Holder(x.kind, x.shard, joined[1]))
    return replace(a, box=box, holders=tuple(holders))
