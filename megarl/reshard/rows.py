"""Builds the template of a reshard map: the join of two layouts, per parameter and pair of shards.

A row says that one box of shard t of a destination kind comes from one box of shard s of a source kind. It holds for every layer and for
every replica on both sides, so the number of rows depends only on tensor and expert parallelism, not on layers, experts or replicas. Which
replica sends to which is worked out (`turns.Turns.assignment`) only when a rank's own list, or a total, is needed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from msgspec.structs import replace

from megarl.box import whole_box
from megarl.reshard.kinds import Kind, Layout, Piece
from megarl.reshard.scale_rows import scale_rows, with_cuts
from megarl.reshard.template import CAST, IDENTITY, QUANTISE, SCALE, ZEROS, Holder, Row, SortedStripes, stripes_of

__all__ = ["CAST", "IDENTITY", "QUANTISE", "SCALE", "ZEROS", "Holder", "Row", "coalesce", "join"]


def join(source: Layout, destination: Layout) -> tuple[Row, ...]:
    """All rows between two layouts. Raises ValueError if the source lacks a logical tensor, or the layouts disagree on layers."""
    stripes = {key: SortedStripes(boxes) for key, boxes in stripes_of(source).items()}
    rows: list[Row] = []
    for k, kind in enumerate(destination.kinds):
        if kind.scales_of is not None:
            continue  # made together with the weights they belong to
        found: list[Row] = []
        for t, tensor in enumerate(kind.shards):
            for piece in tensor.pieces:
                key = piece.logical_name, kind.layers
                if key not in stripes:
                    raise ValueError(_lacking(source, destination, kind, piece))
                for logical, holders, common in stripes[key].within(piece.logical):
                    chosen = _nearest(holders, t, len(kind.shards))
                    moved = tuple([Holder(h.kind, h.shard, common.move(logical, h.held_box)) for h in chosen])
                    box = common.move(piece.logical, piece.local)
                    if kind.rule is None:
                        dtype = source.kinds[chosen[0].kind].shards[chosen[0].shard].dtype
                        found.append(Row(k, t, box, moved, IDENTITY if dtype == tensor.dtype else CAST))
                    else:
                        found.append(Row(k, t, box, moved, QUANTISE, logical_name=piece.logical_name, logical=common))
        if kind.rule is not None:
            found = with_cuts(kind, found)
        rows += found + _padding(source, kind, k, found)
        if kind.rule is not None:
            rows += scale_rows(destination, kind, found)
    return _with_fan(rows)


def coalesce(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Joins rows between the same two ranks whose boxes are contiguous on both sides."""
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        groups[(row.route, row.transform)].append(row)
    merged: list[Row] = []
    for (_, transform), group in groups.items():
        if transform == SCALE:
            merged += group
            continue
        group.sort(key=lambda row: row.box.start)
        current = group[0]
        for row in group[1:]:
            joined = _joined(current, row)
            if joined is None:
                merged.append(current)
            current = joined or row
        merged.append(current)
    return tuple(sorted(merged, key=lambda row: (row.kind, row.shard, row.box.start)))


def _nearest(holders: list[Holder], shard: int, shards: int) -> list[Holder]:
    """Among shards that hold the same elements, picks those that face destination shard `shard` of `shards`, for each kind."""
    if len(holders) == 1:
        return holders
    by_kind: dict[int, list[Holder]] = defaultdict(list)
    for holder in holders:
        by_kind[holder.kind].append(holder)
    chosen = []
    for group in by_kind.values():
        begin, end = shard * len(group) // shards, (shard + 1) * len(group) // shards
        chosen += group[begin : max(end, begin + 1)]
    return chosen


def _lacking(source: Layout, destination: Layout, kind: Kind, piece: Piece) -> str:
    others = [other for other in source.kinds if any(p.logical_name == piece.logical_name for p in other.shards[0].pieces)]
    if not others:
        return f"{destination.name} tensor {kind.name} holds {piece.logical_name}, which {source.name} does not"
    ranges = ", ".join(_span(other) for other in others)
    return f"{piece.logical_name}: {source.name} has {ranges}, {destination.name} {_span(kind)}"


def _span(kind: Kind) -> str:
    return "one" if kind.layers is None else f"layers {kind.layers[0]} to {kind.layers[1] - 1}"


def _padding(source: Layout, kind: Kind, k: int, found: list[Row]) -> list[Row]:
    """Rows of zeros for elements that no piece covers. They have the same sender as the largest row of their shard."""
    rows = []
    for t, tensor in enumerate(kind.shards):
        if sum([piece.local.numel for piece in tensor.pieces]) == math.prod(tensor.shape):
            continue  # the common case: no need to look at boxes
        empty = [whole_box(tensor.shape)]
        for piece in tensor.pieces:
            empty = [rest for box in empty for rest in box.subtract(piece.local)]
        own = [row for row in found if row.shard == t]
        if own:
            holders = max(own, key=lambda row: row.box.numel).holders
        else:  # all padding: sent by the source shard that faces it
            first = found[0].holders[0]
            holders = (Holder(first.kind, t * len(source.kinds[first.kind].shards) // len(kind.shards), None),)
        rows += [Row(k, t, box, tuple(Holder(h.kind, h.shard, None) for h in holders), ZEROS) for box in empty]
    return rows


def _with_fan(rows: list[Row]) -> tuple[Row, ...]:
    fed: dict[tuple[int, int, int], set[int]] = defaultdict(set)
    keys = [(row.weights, row.holders[0].kind, row.holders[0].shard) for row in rows]
    for row, key in zip(rows, keys):
        fed[key].add(row.shard)
    order = {key: {shard: i for i, shard in enumerate(sorted(shards))} for key, shards in fed.items()}
    result = []
    for row, key in zip(rows, keys):
        peers = order[key]
        result.append(replace(row, fan=len(peers), index=peers[row.shard]) if len(peers) > 1 else row)
    return tuple(result)


def _joined(a: Row, b: Row) -> Row | None:
    target = a.box.join(b.box)
    if target is None or a.logical_name != b.logical_name or a.cut != b.cut:  # only cut rows take part in the exchange of amax
        return None
    dim, box = target
    logical = a.logical
    if logical is not None and b.logical is not None:
        whole = logical.join(b.logical)
        if whole is None or whole[0] != dim:
            return None
        logical = whole[1]
    holders = []
    for x, y in zip(a.holders, b.holders):
        if x.box is None or y.box is None:
            holders.append(x)
            continue
        joined = x.box.join(y.box)
        if joined is None or joined[0] != dim:
            return None
        holders.append(Holder(x.kind, x.shard, joined[1]))
    return replace(a, box=box, holders=tuple(holders), logical=logical)
