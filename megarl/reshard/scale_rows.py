"""Rows of quantised kinds: marks cut tiles, and decides which row writes which scale."""

from __future__ import annotations

from msgspec.structs import replace

from megarl.box import Box
from megarl.kernels.quantise_rules import Rule
from megarl.reshard.kinds import Kind, Layout, Piece
from megarl.reshard.scales import of_whole_tensor
from megarl.reshard.template import SCALE, Holder, Row


def with_cuts(kind: Kind, found: list[Row]) -> list[Row]:
    """Marks rows with a tile that reaches beyond the row."""
    rule = kind.rule
    assert rule is not None
    extents: dict[str, Box] = {}
    for row in found:
        known = extents.get(row.logical_name)
        extents[row.logical_name] = row.logical_box if known is None else _hull(known, row.logical_box)
    fused = len({piece.logical_name for tensor in kind.shards for piece in tensor.pieces}) > 1
    return [
        replace(row, cut=True)
        if (of_whole_tensor(rule) and fused) or not rule.whole_tiles(row.logical_box, extents[row.logical_name].end)
        else row
        for row in found
    ]


def _hull(a: Box, b: Box) -> Box:
    start = tuple(map(min, a.start, b.start))
    return Box(start, tuple(max(x, y) - s for x, y, s in zip(a.end, b.end, start)))


def scale_rows(destination: Layout, kind: Kind, found: list[Row]) -> list[Row]:
    """The rows of scales: each scale is written by the row that writes its tile's first element on that shard."""
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
        held = tuple([Holder(h.kind, h.shard, made.move(row.logical_box, h.held_box)) for h in row.holders])
        piece = scales.shards[row.shard].pieces[0 if of_whole_tensor(kind.rule) else number]
        box = tiles.move(piece.logical, piece.local)
        rows.append(Row(kind.scales, row.shard, box, held, SCALE, 1, 0, row.logical_name, made, row.cut, row.kind))
    return rows


def _owned(rule: Rule, piece: Piece, number: int, logical: Box) -> tuple[Box, Box] | None:
    """(the part of `logical` in tiles whose scale this row writes, those tiles); None if it writes no scale."""
    start, shape = list(logical.start), list(logical.shape)
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
