"""The template of a reshard map: rows, and the stripes of the source that they are cut from."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from megarl.base.geometry import Box, whole_box
from megarl.kernels.quantise_rules import Rule
from megarl.models.parameters import Layers
from megarl.reshard.layout import Kind, Layout, Piece, of_whole_tensor

IDENTITY = "identity"
CAST = "cast"
ZEROS = "zeros"
QUANTISE = "quantise"
SCALE = "scale"

LogicalKey = tuple[str, Layers | None]
Stripes = dict[LogicalKey, dict[Box, list["Holder"]]]


class Holder(Struct, frozen=True, gc=False):
    """A shard of a source kind that has the elements, in `box`.

    `box` is None for zeros, where only the sender matters.
    """

    kind: int  # index into source.kinds
    shard: int
    box: Box | None

    @property
    def held_box(self) -> Box:
        """`box`, which must not be None (as it is for zeros)."""
        assert self.box is not None
        return self.box


class Row(Struct, frozen=True, gc=False):
    """States that `box` of shard `shard` of destination kind `kind` comes from any one of
    `holders`.

    `fan` is the number of destination shards that the sending shard feeds with this kind; `index`
    is this shard's place among them. For a quantised kind, `logical` is the box in the logical
    tensor, which defines the tiles. `cut`: a tile extends beyond it, so that its amax needs other
    ranks. A row of scales has the box of the weights that the scales are made from.
    """

    kind: int  # index into destination.kinds
    shard: int
    box: Box
    holders: tuple[Holder, ...]
    transform: str  # IDENTITY | CAST | ZEROS | QUANTISE | SCALE
    fan: int = 1
    index: int = 0
    logical_name: str = ""
    logical: Box | None = None
    cut: bool = False
    travels_with: int | None = None  # kind of the weights that a row of scales belongs to

    @property
    def weights(self) -> int:
        """The row's kind, or for a row of scales the kind of their weights."""
        return self.kind if self.travels_with is None else self.travels_with

    @property
    def logical_box(self) -> Box:
        """`logical`, which must not be None: it is set only in rows that quantise or make scales."""
        assert self.logical is not None
        return self.logical

    @property
    def route(self) -> tuple:
        """A key. Rows with equal routes have the same senders and receivers."""
        return (
            self.weights,
            self.shard,
            tuple([(h.kind, h.shard) for h in self.holders]),
            self.fan,
            self.index,
        )


def stripes_of(source: Layout) -> Stripes:
    """Logical tensor -> logical box -> all holders of exactly that box."""
    stripes: Stripes = defaultdict(lambda: defaultdict(list))
    for k, kind in enumerate(source.kinds):
        for s, tensor in enumerate(kind.shards):
            for piece in tensor.pieces:
                stripes[piece.logical_name, kind.layers][piece.logical].append(
                    Holder(k, s, piece.local)
                )
    return stripes


class SortedStripes:
    """The stripes of one logical tensor, sorted so that the stripes within a box are found without
    a search of all stripes.
    """

    def __init__(self, boxes: dict[Box, list[Holder]]):
        self.sorted = sorted(boxes.items(), key=lambda entry: entry[0].start)
        first = self.sorted[0][0]
        others = [box for box, _ in self.sorted]
        dims = range(len(first.start))
        cut = [
            d
            for d in dims
            if any(
                box.start[d] != first.start[d] or box.shape[d] != first.shape[d] for box in others
            )
        ]
        self.dim = cut[0] if cut else 0
        self.starts = [box.start[self.dim] for box in others] if cut else [0]
        self.ends = [box.start[self.dim] + box.shape[self.dim] for box in others] if cut else [1]
        self.ordered = len(cut) == 1 and all(a <= b for a, b in zip(self.ends, self.starts[1:]))

    def within(self, box: Box) -> Iterator[tuple[Box, list[Holder], Box]]:
        """Yields (stripe, its holders, its intersection with `box`)."""
        candidates = self.sorted
        if self.ordered:
            start = box.start[self.dim]
            candidates = candidates[
                bisect_right(self.ends, start) : bisect_left(
                    self.starts, start + box.shape[self.dim]
                )
            ]
        for logical, holders in candidates:
            common = logical.intersect(box)
            if common is not None:
                yield logical, holders, common


# Rows of quantised kinds: which tiles are cut, and which row writes which scale.


def with_cuts(kind: Kind, found: list[Row]) -> list[Row]:
    """Marks rows that have a tile which extends beyond the row."""
    rule = kind.rule
    assert rule is not None
    extents: dict[str, Box] = {}
    for row in found:
        known = extents.get(row.logical_name)
        extents[row.logical_name] = (
            row.logical_box if known is None else _hull(known, row.logical_box)
        )
    fused = len({piece.logical_name for tensor in kind.shards for piece in tensor.pieces}) > 1
    return [
        replace(row, cut=True)
        if (of_whole_tensor(rule) and fused)
        or not rule.whole_tiles(row.logical_box, extents[row.logical_name].end)
        else row
        for row in found
    ]


def _hull(a: Box, b: Box) -> Box:
    start = tuple(map(min, a.start, b.start))
    return Box(start, tuple(max(x, y) - s for x, y, s in zip(a.end, b.end, start)))


def scale_rows(destination: Layout, kind: Kind, found: list[Row]) -> list[Row]:
    """The rows of scales.

    Each scale is written by the row that writes the first element of its tile on that shard.
    """
    assert kind.rule is not None and kind.scales is not None
    scales = destination.kinds[kind.scales]
    rows = []
    for row in found:
        tensor = kind.shards[row.shard]
        number = next(i for i, piece in enumerate(tensor.pieces) if piece.local.contains(row.box))
        owned = _owned(kind.rule, tensor.pieces[number], number, row.logical_box)
        if owned is None:
            continue
        made, tiles = owned
        held = tuple(
            [Holder(h.kind, h.shard, made.move(row.logical_box, h.held_box)) for h in row.holders]
        )
        piece = scales.shards[row.shard].pieces[0 if of_whole_tensor(kind.rule) else number]
        box = tiles.move(piece.logical, piece.local)
        rows.append(
            Row(
                kind.scales,
                row.shard,
                box,
                held,
                SCALE,
                1,
                0,
                row.logical_name,
                made,
                row.cut,
                row.kind,
            )
        )
    return rows


def _owned(rule: Rule, piece: Piece, number: int, logical: Box) -> tuple[Box, Box] | None:
    """(the part of `logical` in tiles whose scale this row writes, those tiles); None if it writes
    no scale.
    """
    start = list(logical.start)
    shape = list(logical.shape)
    if of_whole_tensor(rule) and number:
        return None
    for dim, size in ((-2, rule.rows), (-1, rule.cols)):
        first = logical.start[dim]
        if first != piece.logical.start[dim]:  # the first tile may have begun in another row
            if size is None:
                return None
            first = -(-first // size) * size
        if first >= logical.start[dim] + logical.shape[dim]:
            return None
        start[dim], shape[dim] = first, logical.start[dim] + logical.shape[dim] - first
    made = Box(tuple(start), tuple(shape))
    return made, rule.tiles(made)


# Builds the template of a reshard map: the join of two layouts, per parameter and pair of shards.
#
# A row states that one box of shard t of a destination kind comes from one box of shard s of a
# source kind. It holds for every layer and for every replica on both sides. So the number of rows
# depends only on tensor and expert parallelism. Which replica sends to which is computed
# (`turns.Turns.assignment`) only when a rank's own list, or a total, is needed.


__all__ = ["CAST", "IDENTITY", "QUANTISE", "SCALE", "ZEROS", "Holder", "Row", "coalesce", "join"]


def join(source: Layout, destination: Layout) -> tuple[Row, ...]:
    """All rows between two layouts.

    Raises ValueError if the source lacks a logical tensor, or the layouts disagree on layers.
    """
    stripes = {key: SortedStripes(boxes) for key, boxes in stripes_of(source).items()}
    rows: list[Row] = []
    for k, kind in enumerate(destination.kinds):
        if kind.scales_of is not None:
            continue  # made together with their weights
        found: list[Row] = []
        for t, tensor in enumerate(kind.shards):
            for piece in tensor.pieces:
                key = piece.logical_name, kind.layers
                if key not in stripes:
                    raise ValueError(_lacking(source, destination, kind, piece))
                for logical, holders, common in stripes[key].within(piece.logical):
                    chosen = _nearest(holders, t, len(kind.shards))
                    moved = tuple(
                        [Holder(h.kind, h.shard, common.move(logical, h.held_box)) for h in chosen]
                    )
                    box = common.move(piece.logical, piece.local)
                    if kind.rule is None:
                        dtype = source.kinds[chosen[0].kind].shards[chosen[0].shard].dtype
                        found.append(
                            Row(k, t, box, moved, IDENTITY if dtype == tensor.dtype else CAST)
                        )
                    else:
                        found.append(
                            Row(
                                k,
                                t,
                                box,
                                moved,
                                QUANTISE,
                                logical_name=piece.logical_name,
                                logical=common,
                            )
                        )
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
    """Among shards with the same elements, picks for each kind those that face destination shard
    `shard` of `shards`.
    """
    if len(holders) == 1:
        return holders
    by_kind: dict[int, list[Holder]] = defaultdict(list)
    for holder in holders:
        by_kind[holder.kind].append(holder)
    chosen = []
    for group in by_kind.values():
        begin = shard * len(group) // shards
        end = (shard + 1) * len(group) // shards
        chosen += group[begin : max(end, begin + 1)]
    return chosen


def _lacking(source: Layout, destination: Layout, kind: Kind, piece: Piece) -> str:
    others = [
        other
        for other in source.kinds
        if any(p.logical_name == piece.logical_name for p in other.shards[0].pieces)
    ]
    if not others:
        return (
            f"{destination.name} tensor {kind.name} holds {piece.logical_name}, which "
            f"{source.name} does not"
        )
    ranges = ", ".join(_span(other) for other in others)
    return f"{piece.logical_name}: {source.name} has {ranges}, {destination.name} {_span(kind)}"


def _span(kind: Kind) -> str:
    return "one" if kind.layers is None else f"layers {kind.layers[0]} to {kind.layers[1] - 1}"


def _padding(source: Layout, kind: Kind, k: int, found: list[Row]) -> list[Row]:
    """Rows of zeros for elements that no piece covers.

    They have the same sender as the largest row of their shard.
    """
    rows = []
    for t, tensor in enumerate(kind.shards):
        if sum([piece.local.numel for piece in tensor.pieces]) == math.prod(tensor.shape):
            continue  # the common case, without looking at boxes
        empty = [whole_box(tensor.shape)]
        for piece in tensor.pieces:
            empty = [rest for box in empty for rest in box.subtract(piece.local)]
        own = [row for row in found if row.shard == t]
        if own:
            holders = max(own, key=lambda row: row.box.numel).holders
        else:  # all padding: the facing source shard sends it
            first = found[0].holders[0]
            holders = (
                Holder(
                    first.kind, t * len(source.kinds[first.kind].shards) // len(kind.shards), None
                ),
            )
        rows += [
            Row(k, t, box, tuple(Holder(h.kind, h.shard, None) for h in holders), ZEROS)
            for box in empty
        ]
    return rows


def _with_fan(rows: list[Row]) -> tuple[Row, ...]:
    fed: dict[tuple[int, int, int], set[int]] = defaultdict(set)
    keys = [(row.weights, row.holders[0].kind, row.holders[0].shard) for row in rows]
    for row, key in zip(rows, keys):
        fed[key].add(row.shard)
    order = {
        key: {shard: i for i, shard in enumerate(sorted(shards))} for key, shards in fed.items()
    }
    result = []
    for row, key in zip(rows, keys):
        peers = order[key]
        result.append(
            replace(row, fan=len(peers), index=peers[row.shard]) if len(peers) > 1 else row
        )
    return tuple(result)


def _joined(a: Row, b: Row) -> Row | None:
    target = a.box.join(b.box)
    # only cut rows take part in the exchange of amax
    if target is None or a.logical_name != b.logical_name or a.cut != b.cut:
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
