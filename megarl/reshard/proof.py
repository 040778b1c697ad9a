"""Proves that a reshard map writes every destination element exactly once, from a place that holds
that element.

The proof does not rely on how the map was built. The two layouts define the elements that every
tensor must have. The proof checks the extents, disjointness and total volume of the written boxes.
It checks that each box and its source have the same logical elements, and that every sender has the
tensor that it sends. For quantised tensors, it checks that each scale is made from the weights of
its own tile. Copies that quantise only part of a tile must be marked so.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.base.geometry import Box, whole_box
from megarl.kernels.quantise_rules import Rule
from megarl.reshard.layout import Kind, Layout, LocalTensor, Piece, of_whole_tensor, scale_name
from megarl.reshard.map import ReshardMap
from megarl.reshard.template import CAST, IDENTITY, QUANTISE, SCALE, ZEROS, TemplateRow


class ProofError(RuntimeError):
    """The map would leave an element unwritten, write it twice, or write a wrong value."""


@dataclass(frozen=True)
class _Write:
    """The facts of a row to check. Boxes and tensors have equally many dims."""

    location: str
    transform: str
    tensor: LocalTensor  # destination tensor
    box: Box
    source: LocalTensor | None  # source tensor
    origin: Box | None
    rule: Rule | None
    cut: bool
    extents: dict[str, tuple[int, ...]]  # shapes of the logical tensors


def prove_exactly_once(map: ReshardMap) -> None:
    """Checks template rows and joined write rows per shard, then senders and receivers of all
    layers and replicas.

    Raises ProofError that names tensor and rank.
    """
    for layout in (map.source, map.destination):
        _check_coordinates(layout)
    _check_rows(map)
    checked: set[tuple] = set()
    for row in map.rows:
        target = map.destination.kinds[row.kind]
        # the same for scales and their weights
        coordinates = row.route, id(target.stages), id(target.ranks)
        if coordinates not in checked:
            checked.add(coordinates)
            check_senders(map, row)


def check_senders(map: ReshardMap, row: TemplateRow) -> None:
    """Checks that every instance and replica has one sender, which has the sending shard of that
    instance, and the right receiver.

    First checks that the instances of a class are on the same stages, then goes class by class.
    """
    target = map.destination.kinds[row.kind]
    assignment = map.turns.assignment(row)
    coordinates = len(assignment.first), target.replicas
    if (
        len(assignment.class_of) != target.instances
        or not assignment.holders.shape == assignment.senders.shape == coordinates
    ):
        raise ProofError(
            f"{target.name}: senders of shape {assignment.senders.shape} for {target.instances} "
            "instances"
        )
    representatives = assignment.first[assignment.class_of]
    _check_same_stages(target, representatives)
    wrong = assignment.receivers != target.ranks[target.stages[assignment.first], row.shard]
    checked = np.zeros_like(wrong)
    for h, holder in enumerate(row.holders):
        origin = map.source.kinds[holder.kind]
        _check_same_stages(origin, representatives)
        sends = assignment.holders == h
        ranks = origin.ranks[origin.stages[assignment.first], holder.shard]
        checked |= sends
        wrong |= sends & ~_contains(ranks, assignment.senders, map.source.world_size)
    if (wrong | ~checked).any():
        c, e = (int(x) for x in np.argwhere(wrong | ~checked)[0])
        instance = int(assignment.first[c])
        receiver = target.ranks[target.stages[instance], row.shard, e]
        name = map.source.kinds[row.holders[0].kind].name_of(instance)
        raise ProofError(
            f"{target.name_of(instance)} on {map.destination.name} rank {receiver}: "
            f"{map.source.name} rank {assignment.senders[c, e]} does not hold {name}"
        )


def _contains(ranks: np.ndarray, senders: np.ndarray, world_size: int) -> np.ndarray:
    """Whether each sender [classes, replicas] is among the `ranks` [classes, candidates]."""
    if ranks.shape[1] == 1:
        return senders == ranks
    holds = np.zeros((len(ranks), world_size), dtype=bool)
    np.put_along_axis(holds, ranks, True, axis=1)
    return np.take_along_axis(holds, senders, axis=1)


def _check_same_stages(kind: Kind, representatives: np.ndarray) -> None:
    """`representatives` [instances]: the instance that represents each one."""
    if (
        len(representatives) != kind.instances
        or (kind.stages[representatives] != kind.stages).any()
    ):
        raise ProofError(f"{kind.name}: layers of different stages are treated as equal")


def _check_rows(map: ReshardMap) -> None:
    """Checks the rows of every destination shard, and the joined ones where they are others."""
    extents: dict[str, tuple[int, ...]] = {}
    if any(kind.rule is not None for kind in map.destination.kinds):
        extents = _extents(tensor for kind in map.source.kinds for tensor in kind.shards)
    rows_of = _of_shards(map.rows)
    write_rows_of = _of_shards(map.write_rows)
    for k, kind in enumerate(map.destination.kinds):
        for t in range(len(kind.shards)):
            rows = rows_of.pop((k, t), [])
            write_rows = write_rows_of.pop((k, t), [])
            _check_shard(map, (k, t), rows, extents)
            if write_rows != rows:
                _check_shard(map, (k, t), write_rows, extents)
    for k, t in (*rows_of, *write_rows_of):
        raise ProofError(f"destination kind {k}, shard {t}: written, but not in the layout")


def _of_shards(rows: Iterable[TemplateRow]) -> dict[tuple[int, int], list[TemplateRow]]:
    """(kind, shard) of the destination -> its rows."""
    of_shard: dict[tuple[int, int], list[TemplateRow]] = defaultdict(list)
    for row in rows:
        of_shard[row.kind, row.shard].append(row)
    return of_shard


def _check_shard(
    map: ReshardMap,
    shard: tuple[int, int],
    rows: Sequence[TemplateRow],
    extents: dict[str, tuple[int, ...]],
) -> None:
    k, t = shard
    kind = map.destination.kinds[k]
    rule = kind.rule
    if kind.scales_of is not None:
        rule = map.destination.kinds[kind.scales_of].rule
    rank = kind.ranks[kind.stages[0], t, 0]
    location = f"{kind.name_of(0)} on {map.destination.name} rank {rank}"
    _check_cover(location, kind.shards[t].shape, [row.box for row in rows])
    for row in rows:
        for holder in row.holders:
            source_kind = map.source.kinds[holder.kind]
            source = None if row.transform == ZEROS else source_kind.shards[holder.shard]
            write = _Write(
                location=location,
                transform=row.transform,
                tensor=kind.shards[t],
                box=row.box,
                source=source,
                origin=holder.box,
                rule=rule,
                cut=row.cut,
                extents=extents,
            )
            piece = _check_content(write)
            marked = row.logical_name, row.logical
            if row.logical is not None and (
                piece is None or (piece.logical_name, piece.logical) != marked
            ):
                raise ProofError(
                    f"{location}: quantises {piece}, but counts tiles of "
                    f"{row.logical_name} {row.logical}"
                )
            if source is not None and source_kind.layers != kind.layers:
                raise ProofError(
                    f"{location}: layers {kind.layers} come from {source_kind.name}, "
                    f"which is there for {source_kind.layers}"
                )


def _check_cover(location: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Checks that boxes lie inside the tensor, are disjoint, and add up to its volume: so they
    cover every element exactly once.
    """
    for box in boxes:
        is_box = len(box.shape) == len(shape) and min(box.shape, default=1) > 0
        if not is_box or not whole_box(shape).contains(box):
            raise ProofError(f"{location}: {box} is not inside shape {shape}")
    clash = _overlap(boxes)
    if clash is not None:
        raise ProofError(f"{location}: written twice, by {clash[0]} and {clash[1]}")
    missing = math.prod(shape) - sum(box.numel for box in boxes)
    if missing:
        raise ProofError(f"{location}: {missing} elements are never written")


def _overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes with a common element, or None.

    Sweeps the dim with the most cuts, so that few boxes are open at a time.
    """
    if len(boxes) < 2:
        return None
    sweep = max(range(len(boxes[0].start)), key=lambda d: len({box.start[d] for box in boxes}))
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.start[sweep]):
        open_boxes = [open_box for open_box in open_boxes if open_box.end[sweep] > box.start[sweep]]
        for open_box in open_boxes:
            if open_box.intersect(box) is not None:
                return open_box, box
        open_boxes.append(box)
    return None


def _check_content(write: _Write) -> Piece | None:
    """Checks that the box of the destination tensor receives its own logical elements from `origin`
    of the tensor `source`, or zeros.

    For quantised weights and for scales, returns the weights that they are made from.
    """
    location = write.location
    tensor = write.tensor
    box = write.box
    source = write.source
    origin = write.origin
    overlaps = _overlaps(tensor, box)
    if write.transform == ZEROS:
        if overlaps:
            raise ProofError(f"{location}: zeros in {box} overwrite {overlaps[0][0].logical_name}")
        return None
    if source is None or origin is None or (origin.shape != box.shape and write.transform != SCALE):
        raise ProofError(f"{location}: {box} comes from {origin}")
    if any(a < 0 or a + n > m for a, n, m in zip(origin.start, origin.shape, source.shape)):
        raise ProofError(
            f"{location}: source {origin} is not inside {source.name} of shape {source.shape}"
        )
    if write.transform == SCALE:
        return _check_scales(write, overlaps)
    if write.rule is not None:
        transform = QUANTISE
    elif source.dtype == tensor.dtype:
        transform = IDENTITY
    else:
        transform = CAST
    if write.transform != transform:
        raise ProofError(f"{location}: {write.transform} from {source.dtype} to {tensor.dtype}")
    if sum(common.numel for _, common in overlaps) != box.numel:
        raise ProofError(
            f"{location}: {box} from {source.name} also covers padding, which must hold zeros"
        )
    for piece, common in overlaps:
        _check_same_elements(
            location,
            source,
            common.move(box, origin),
            piece.logical_name,
            common.move(piece.local, piece.logical),
        )
    if write.transform != QUANTISE:
        return None
    if len(overlaps) != 1:
        raise ProofError(f"{location}: {box} is quantised across {len(overlaps)} pieces")
    piece, common = overlaps[0]
    quantised = Piece(common, piece.logical_name, common.move(piece.local, piece.logical))
    neighbours = set()
    for neighbour in tensor.pieces:
        if neighbour.local.start[:-2] == piece.local.start[:-2]:
            neighbours.add(neighbour.logical_name)
    _check_cut_mark(write, quantised, len(neighbours) > 1)
    return quantised


def _overlaps(tensor: LocalTensor, box: Box) -> list[tuple[Piece, Box]]:
    """The pieces that have elements in `box` of the tensor, and these elements."""
    overlaps = []
    for piece in tensor.pieces:
        common = piece.local.intersect(box)
        if common is not None:
            overlaps.append((piece, common))
    return overlaps


def _check_scales(write: _Write, overlaps: list[tuple[Piece, Box]]) -> Piece:
    """Checks that the scales in the box belong to the tiles of the weights in `origin`, each
    written by the row where its tile begins.
    """
    location = write.location
    source = write.source
    origin = write.origin
    rule = write.rule
    assert source is not None and origin is not None and rule is not None
    sources = _overlaps(source, origin)
    if len(sources) != 1 or sources[0][1] != origin or len(overlaps) != 1:
        raise ProofError(
            f"{location}: scales in {write.box} are made from {len(sources)} pieces of "
            f"{source.name}"
        )
    source_piece, _ = sources[0]
    piece, common = overlaps[0]
    logical_box = origin.move(source_piece.local, source_piece.logical)
    weights = Piece(origin, source_piece.logical_name, logical_box)
    tiles = rule.tiles(weights.logical)
    needed_tiles = common.move(piece.local, piece.logical)
    if (
        common != write.box
        or scale_name(weights.logical_name, rule) != piece.logical_name
        or tiles != needed_tiles
    ):
        raise ProofError(
            f"{location}: needs {piece.logical_name} {needed_tiles}, but is made from "
            f"{weights.logical_name} {weights.logical}"
        )
    _check_cut_mark(write, weights, False)
    return weights


def _check_cut_mark(write: _Write, weights: Piece, fused: bool) -> None:
    """Checks that a box with only part of a tile is marked as cut."""
    rule = write.rule
    extents = write.extents[weights.logical_name]
    assert rule is not None
    is_whole = rule.whole_tiles(weights.logical, extents) and not (fused and of_whole_tensor(rule))
    if not is_whole and not write.cut:
        raise ProofError(
            f"{write.location}: {weights.logical_name} {weights.logical} cuts tiles, but is not "
            "marked as cut"
        )


def _check_same_elements(
    location: str, source: LocalTensor, local: Box, logical_name: str, logical: Box
) -> None:
    """Checks that `local` of the source tensor has exactly the elements `logical` of the logical
    tensor.
    """
    covered = 0
    for piece, common in _overlaps(source, local):
        actual = common.move(piece.local, piece.logical)
        expected = common.move(local, logical)
        if piece.logical_name != logical_name or actual != expected:
            raise ProofError(
                f"{location}: needs {expected} of {logical_name}, but {source.name} has {actual} "
                f"of {piece.logical_name} there"
            )
        covered += common.numel
    if covered != local.numel:
        raise ProofError(f"{location}: {local} of {source.name} is partly padding")


def _check_coordinates(layout: Layout) -> None:
    """Checks that ranks exist, that no rank has two shards or replicas of one instance, and that
    pieces of a tensor do not overlap.
    """
    _check_names(layout)
    for kind in layout.kinds:
        for stage in set(kind.stages.tolist()):
            ranks = kind.ranks[stage].ravel().tolist()
            if min(ranks) < 0 or max(ranks) >= layout.world_size or len(set(ranks)) != len(ranks):
                raise ProofError(
                    f"{layout.name}: ranks of {kind.name} on stage {stage} are not distinct ranks"
                )
        for shard, tensor in enumerate(kind.shards):
            clash = _overlap([piece.local for piece in tensor.pieces])
            if clash is not None:
                raise ProofError(
                    f"{layout.name}: pieces {clash} of {kind.name}, shard {shard}, overlap"
                )


def _check_names(layout: Layout) -> None:
    """Checks that no rank has two tensors of one name.

    Kinds of different engine groups share names, but no ranks.
    """
    namesakes: dict[str, list[Kind]] = defaultdict(list)
    for kind in layout.kinds:
        namesakes[kind.name].append(kind)
    for kinds in namesakes.values():
        for kind, namesake in itertools.combinations(kinds, 2):
            common_layers = set(kind.layers or [None]) & set(namesake.layers or [None])
            if common_layers and len(np.intersect1d(kind.ranks, namesake.ranks)):
                raise ProofError(f"{layout.name}: two kinds have one name")


def _extents(tensors: Iterable[LocalTensor]) -> dict[str, tuple[int, ...]]:
    """Logical tensor -> its shape, which is the extent of its pieces."""
    extents: dict[str, tuple[int, ...]] = {}
    for tensor in tensors:
        for piece in tensor.pieces:
            extent = extents.get(piece.logical_name, piece.logical.end)
            extents[piece.logical_name] = tuple(map(max, extent, piece.logical.end))
    return extents
