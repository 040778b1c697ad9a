"""The template of a reshard map: rows, and the stripes of the source that they are cut from."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain

from msgspec import Struct
from msgspec.structs import replace

from megarl.base.geometry import Box, whole_box
from megarl.kernels.quantise_rules import Rule
from megarl.models.parameters import Layers, layers_text
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


class TemplateRow(Struct, frozen=True, gc=False):
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
        if self.travels_with is None:
            return self.kind
        return self.travels_with

    @property
    def logical_box(self) -> Box:
        """`logical`, which must not be None: only rows that quantise or make scales have it."""
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


def join(source: Layout, destination: Layout) -> tuple[TemplateRow, ...]:
    """All rows between two layouts, per parameter and pair of shards.

    A row holds for every layer and for every replica on both sides. So the number of rows depends
    only on tensor and expert parallelism. Which replica sends to which is computed
    (`turns.Turns.assignment`) only when a rank's own list, or a total, is needed.

    Raises ValueError if the source lacks a logical tensor, or the layouts disagree on layers.
    """
    stripes = {key: SortedStripes(boxes) for key, boxes in stripes_of(source).items()}
    rows: list[TemplateRow] = []
    for k, kind in enumerate(destination.kinds):
        if kind.scales_of is not None:
            continue  # made together with their weights
        kind_rows: list[TemplateRow] = []
        for t, tensor in enumerate(kind.shards):
            for piece in tensor.pieces:
                key = piece.logical_name, kind.layers
                if key not in stripes:
                    raise ValueError(_lacking(source, destination, kind, piece))
                for logical, holders, common in stripes[key].within(piece.logical):
                    nearest = _nearest(holders, t, len(kind.shards))
                    moved_holders = _moved(nearest, common, logical)
                    box = common.move(piece.logical, piece.local)
                    row = TemplateRow(k, t, box, moved_holders, IDENTITY)
                    dtype = source.kinds[nearest[0].kind].shards[nearest[0].shard].dtype
                    if kind.rule is not None:
                        row = replace(
                            row,
                            transform=QUANTISE,
                            logical_name=piece.logical_name,
                            logical=common,
                        )
                    elif dtype != tensor.dtype:
                        row = replace(row, transform=CAST)
                    kind_rows.append(row)
        if kind.rule is not None:
            kind_rows = with_cuts(kind, kind_rows)
        rows += kind_rows + _padding(source, kind, k, kind_rows)
        if kind.rule is not None:
            rows += scale_rows(destination, kind, kind_rows)
    return _with_fan(rows)


def coalesce(rows: Iterable[TemplateRow]) -> tuple[TemplateRow, ...]:
    """Joins rows between the same two ranks whose boxes are contiguous on both sides."""
    groups: dict[tuple, list[TemplateRow]] = defaultdict(list)
    for row in rows:
        groups[(row.route, row.transform)].append(row)
    merged: list[TemplateRow] = []
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
    nearest = []
    for group in by_kind.values():
        begin = shard * len(group) // shards
        end = (shard + 1) * len(group) // shards
        nearest += group[begin : max(end, begin + 1)]
    return nearest


def _lacking(source: Layout, destination: Layout, kind: Kind, piece: Piece) -> str:
    spans = []
    for source_kind in source.kinds:
        if any(p.logical_name == piece.logical_name for p in source_kind.shards[0].pieces):
            spans.append(_span(source_kind))
    if not spans:
        return (
            f"{destination.name} tensor {kind.name} holds {piece.logical_name}, which "
            f"{source.name} does not"
        )
    ranges = ", ".join(spans)
    return f"{piece.logical_name}: {source.name} has {ranges}, {destination.name} {_span(kind)}"


def _span(kind: Kind) -> str:
    if kind.layers is None:
        return "one"
    return layers_text(kind.layers)


def _padding(source: Layout, kind: Kind, k: int, kind_rows: list[TemplateRow]) -> list[TemplateRow]:
    """Rows of zeros for elements that no piece covers.

    They have the same sender as the largest row of their shard.
    """
    rows = []
    for t, tensor in enumerate(kind.shards):
        if sum([piece.local.numel for piece in tensor.pieces]) == math.prod(tensor.shape):
            continue  # the common case, without looking at boxes
        empty = [whole_box(tensor.shape)]
        for piece in tensor.pieces:
            empty = list(chain.from_iterable(box.subtract(piece.local) for box in empty))
        shard_rows = [row for row in kind_rows if row.shard == t]
        if shard_rows:
            holders = max(shard_rows, key=lambda row: row.box.numel).holders
            senders = tuple([replace(holder, box=None) for holder in holders])
        else:  # all padding: the facing source shard sends it
            first = kind_rows[0].holders[0]
            shard = t * len(source.kinds[first.kind].shards) // len(kind.shards)
            senders = (Holder(first.kind, shard, None),)
        rows += [TemplateRow(k, t, box, senders, ZEROS) for box in empty]
    return rows


def _with_fan(rows: list[TemplateRow]) -> tuple[TemplateRow, ...]:
    fed_shards: dict[tuple[int, int, int], set[int]] = defaultdict(set)
    keys = [(row.weights, row.holders[0].kind, row.holders[0].shard) for row in rows]
    for row, key in zip(rows, keys):
        fed_shards[key].add(row.shard)
    order = {key: sorted(shards) for key, shards in fed_shards.items()}
    result = []
    for row, key in zip(rows, keys):
        index = bisect_left(order[key], row.shard)
        result.append(replace(row, fan=len(order[key]), index=index))
    return tuple(result)


def _joined(a: TemplateRow, b: TemplateRow) -> TemplateRow | None:
    target = a.box.join(b.box)
    # only cut rows take part in the exchange of amax
    if target is None or a.logical_name != b.logical_name or a.cut != b.cut:
        return None
    dim, box = target
    logical = a.logical
    if logical is not None and b.logical is not None:
        joined_logical = logical.join(b.logical)
        if joined_logical is None or joined_logical[0] != dim:
            return None
        logical = joined_logical[1]
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
        spans = zip(*[zip(box.start, box.end) for box, _ in self.sorted])  # [dim][stripe]
        cut_spans = [(dim, span) for dim, span in enumerate(spans) if len(set(span)) > 1]
        self.ordered = False
        if len(cut_spans) == 1:
            self.dim, span = cut_spans[0]
            self.starts, self.ends = zip(*span)
            self.ordered = all(a <= b for a, b in zip(self.ends, self.starts[1:]))

    def within(self, box: Box) -> Iterator[tuple[Box, list[Holder], Box]]:
        """Yields (stripe, its holders, its intersection with `box`)."""
        candidates = self.sorted
        if self.ordered:
            first = bisect_right(self.ends, box.start[self.dim])
            candidates = candidates[first : bisect_left(self.starts, box.end[self.dim])]
        for logical, holders in candidates:
            common = logical.intersect(box)
            if common is not None:
                yield logical, holders, common


def with_cuts(kind: Kind, rows: list[TemplateRow]) -> list[TemplateRow]:
    """Marks rows that have a tile which extends beyond the row."""
    rule = kind.rule
    assert rule is not None
    extents: dict[str, tuple[int, ...]] = {}
    for row in rows:
        end = row.logical_box.end
        extents[row.logical_name] = tuple(map(max, extents.get(row.logical_name, end), end))
    logical_names = set()
    for tensor in kind.shards:
        logical_names.update(piece.logical_name for piece in tensor.pieces)
    fused = len(logical_names) > 1
    result: list[TemplateRow] = []
    for row in rows:
        has_whole_tiles = rule.whole_tiles(row.logical_box, extents[row.logical_name])
        cut = (of_whole_tensor(rule) and fused) or not has_whole_tiles
        result.append(replace(row, cut=cut))
    return result


def scale_rows(
    destination: Layout, kind: Kind, weight_rows: list[TemplateRow]
) -> list[TemplateRow]:
    """The rows of scales.

    Each scale is written by the row that writes the first element of its tile on that shard.
    """
    assert kind.rule is not None and kind.scales is not None
    scales = destination.kinds[kind.scales]
    rows = []
    for row in weight_rows:
        tensor = kind.shards[row.shard]
        number = next(i for i, piece in enumerate(tensor.pieces) if piece.local.contains(row.box))
        part = _scale_part(kind.rule, tensor.pieces[number], number, row.logical_box)
        if part is None:
            continue
        weights_box, tiles = part
        piece = scales.shards[row.shard].pieces[0 if of_whole_tensor(kind.rule) else number]
        scale_row = TemplateRow(
            kind=kind.scales,
            shard=row.shard,
            box=tiles.move(piece.logical, piece.local),
            holders=_moved(row.holders, weights_box, row.logical_box),
            transform=SCALE,
            logical_name=row.logical_name,
            logical=weights_box,
            cut=row.cut,
            travels_with=row.kind,
        )
        rows.append(scale_row)
    return rows


def _moved(holders: Iterable[Holder], logical: Box, stripe: Box) -> tuple[Holder, ...]:
    """The holders of `stripe`, with their boxes of `logical`, which is inside it."""
    moved_holders = []
    for holder in holders:
        moved_holders.append(replace(holder, box=logical.move(stripe, holder.held_box)))
    return tuple(moved_holders)


def _scale_part(rule: Rule, piece: Piece, number: int, logical: Box) -> tuple[Box, Box] | None:
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
        if first >= logical.end[dim]:
            return None
        start[dim] = first
        shape[dim] = logical.end[dim] - first
    weights_box = Box(tuple(start), tuple(shape))
    return weights_box, rule.tiles(weights_box)
