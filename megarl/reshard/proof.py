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
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.base.geometry import Box
from megarl.kernels.quantise_rules import Rule
from megarl.reshard.layout import Kind, Layout, LocalTensor, Piece, of_whole_tensor, scale_name
from megarl.reshard.map import ReshardMap
from megarl.reshard.template import CAST, IDENTITY, QUANTISE, SCALE, ZEROS, Row

# Proves that each sender of a row has its elements, and that each receiver needs them.


class ProofError(RuntimeError):
    """The map would leave an element unwritten, write it twice, or write a wrong value."""


def check_senders(map: ReshardMap, row: Row) -> None:
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
    alike = assignment.first[assignment.class_of]
    _check_same_stages(target, alike)
    wrong = assignment.receivers != target.ranks[target.stages[assignment.first], row.shard]
    known = np.zeros_like(wrong)
    for h, holder in enumerate(row.holders):
        origin = map.source.kinds[holder.kind]
        _check_same_stages(origin, alike)
        here = assignment.holders == h
        seated = np.zeros((coordinates[0], map.source.world_size), dtype=bool)
        np.put_along_axis(
            seated, origin.ranks[origin.stages[assignment.first], holder.shard], True, axis=1
        )
        known |= here
        wrong |= here & ~np.take_along_axis(seated, assignment.senders, axis=1)
    if (wrong | ~known).any():
        c, e = (int(x) for x in np.argwhere(wrong | ~known)[0])
        instance = int(assignment.first[c])
        receiver = target.ranks[target.stages[instance], row.shard, e]
        name = map.source.kinds[row.holders[0].kind].name_of(instance)
        raise ProofError(
            f"{target.name_of(instance)} on {map.destination.name} rank {receiver}: "
            f"{map.source.name} rank {assignment.senders[c, e]} does not hold {name}"
        )


def _check_same_stages(kind: Kind, alike: np.ndarray) -> None:
    """`alike` [instances]: the instance that represents each one."""
    if len(alike) != kind.instances or (kind.stages[alike] != kind.stages).any():
        raise ProofError(f"{kind.name}: layers of different stages are treated as equal")


__all__ = ["ProofError", "prove_exactly_once"]


@dataclass(frozen=True)
class _Write:
    """The facts of a row to check. Boxes and tensors have equally many dims."""

    where: str
    transform: str
    tensor: LocalTensor  # destination tensor
    box: Box
    held: LocalTensor | None  # source tensor
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
    for rows in (map.rows, map.write_rows):
        _check_rows(map, rows)
    checked: set[tuple] = set()
    for row in map.rows:
        target = map.destination.kinds[row.kind]
        # the same for scales and their weights
        coordinates = row.route, id(target.stages), id(target.ranks)
        if coordinates not in checked:
            checked.add(coordinates)
            check_senders(map, row)


def _check_rows(map: ReshardMap, rows: Sequence[Row]) -> None:
    of_shard: dict[tuple[int, int], list[Row]] = defaultdict(list)
    for row in rows:
        of_shard[row.kind, row.shard].append(row)
    extents = (
        _extents(tensor for kind in map.source.kinds for tensor in kind.shards)
        if _quantises(map)
        else {}
    )
    for k, kind in enumerate(map.destination.kinds):
        for t, tensor in enumerate(kind.shards):
            where = (
                f"{kind.name_of(0)} on {map.destination.name} rank "
                f"{kind.ranks[kind.stages[0], t, 0]}"
            )
            own = of_shard.pop((k, t), [])
            _check_cover(where, tensor.shape, [row.box for row in own])
            for row in own:
                for holder in row.holders:
                    origin = map.source.kinds[holder.kind]
                    held = None if row.transform == ZEROS else origin.shards[holder.shard]
                    weights = (
                        kind if kind.scales_of is None else map.destination.kinds[kind.scales_of]
                    )
                    checked = _Write(
                        where,
                        row.transform,
                        tensor,
                        row.box,
                        held,
                        holder.box,
                        weights.rule,
                        row.cut,
                        extents,
                    )
                    found = _check_content(checked)
                    told = row.logical_name, row.logical
                    if row.logical is not None and (
                        found is None or (found.logical_name, found.logical) != told
                    ):
                        raise ProofError(
                            f"{where}: quantises {found}, but counts tiles of {row.logical_name} "
                            f"{row.logical}"
                        )
                    if held is not None and origin.layers != kind.layers:
                        raise ProofError(
                            f"{where}: layers {kind.layers} come from {origin.name}, which is "
                            f"there for {origin.layers}"
                        )
    for k, t in of_shard:
        raise ProofError(f"destination kind {k}, shard {t}: written, but not in the layout")


def _check_cover(where: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Checks that boxes lie inside the tensor, are disjoint, and add up to its volume: so they
    cover every element exactly once.
    """
    for box in boxes:
        if len(box.shape) != len(shape) or any(
            a < 0 or n < 1 or a + n > m for a, n, m in zip(box.start, box.shape, shape)
        ):
            raise ProofError(f"{where}: {box} is not inside shape {shape}")
    clash = _overlap(boxes)
    if clash is not None:
        raise ProofError(f"{where}: written twice, by {clash[0]} and {clash[1]}")
    missing = int(np.prod(shape, dtype=np.int64)) - sum(box.numel for box in boxes)
    if missing:
        raise ProofError(f"{where}: {missing} elements are never written")


def _overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes with a common element, or None.

    Sweeps the dim with the most cuts, so that few boxes are open at a time.
    """
    if len(boxes) < 2:
        return None
    sweep = max(range(len(boxes[0].start)), key=lambda d: len({box.start[d] for box in boxes}))
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.start[sweep]):
        open_boxes = [other for other in open_boxes if other.end[sweep] > box.start[sweep]]
        for other in open_boxes:
            if other.intersect(box) is not None:
                return other, box
        open_boxes.append(box)
    return None


def _check_content(write: _Write) -> Piece | None:
    """Checks that the box of the destination tensor receives its own logical elements from `origin`
    of the tensor `held`, or zeros.

    For quantised weights and for scales, returns the weights that they are made from.
    """
    where = write.where
    tensor = write.tensor
    box = write.box
    held = write.held
    origin = write.origin
    wanted = [
        (piece, common)
        for piece in tensor.pieces
        if (common := piece.local.intersect(box)) is not None
    ]
    if write.transform == ZEROS:
        if wanted:
            raise ProofError(f"{where}: zeros in {box} overwrite {wanted[0][0].logical_name}")
        return None
    if held is None or origin is None or (origin.shape != box.shape and write.transform != SCALE):
        raise ProofError(f"{where}: {box} comes from {origin}")
    if any(a < 0 or a + n > m for a, n, m in zip(origin.start, origin.shape, held.shape)):
        raise ProofError(
            f"{where}: source {origin} is not inside {held.name} of shape {held.shape}"
        )
    if write.transform == SCALE:
        return _check_scales(write, wanted)
    needed = (
        QUANTISE if write.rule is not None else IDENTITY if held.dtype == tensor.dtype else CAST
    )
    if write.transform != needed:
        raise ProofError(f"{where}: {write.transform} from {held.dtype} to {tensor.dtype}")
    if sum(common.numel for _, common in wanted) != box.numel:
        raise ProofError(
            f"{where}: {box} from {held.name} also covers padding, which must hold zeros"
        )
    for piece, common in wanted:
        _check_same_elements(
            where,
            held,
            common.move(box, origin),
            piece.logical_name,
            common.move(piece.local, piece.logical),
        )
    if write.transform != QUANTISE:
        return None
    if len(wanted) != 1:
        raise ProofError(f"{where}: {box} is quantised across {len(wanted)} pieces")
    piece, common = wanted[0]
    quantised = Piece(common, piece.logical_name, common.move(piece.local, piece.logical))
    beside = {
        other.logical_name
        for other in tensor.pieces
        if other.local.start[:-2] == piece.local.start[:-2]
    }
    _check_told(write, quantised, len(beside) > 1)
    return quantised


def _check_scales(write: _Write, wanted: list[tuple[Piece, Box]]) -> Piece:
    """Checks that the scales in the box belong to the tiles of the weights in `origin`, each
    written by the row where its tile begins.
    """
    where = write.where
    held = write.held
    origin = write.origin
    rule = write.rule
    assert held is not None and origin is not None and rule is not None
    sources = [
        (piece, common)
        for piece in held.pieces
        if (common := piece.local.intersect(origin)) is not None
    ]
    if len(sources) != 1 or sources[0][1] != origin or len(wanted) != 1:
        raise ProofError(
            f"{where}: scales in {write.box} are made from {len(sources)} pieces of {held.name}"
        )
    (source, _), (piece, common) = sources[0], wanted[0]
    made = Piece(origin, source.logical_name, origin.move(source.local, source.logical))
    tiles = rule.tiles(made.logical)
    needed = common.move(piece.local, piece.logical)
    if (
        common != write.box
        or scale_name(made.logical_name, rule) != piece.logical_name
        or tiles != needed
    ):
        raise ProofError(
            f"{where}: needs {piece.logical_name} {needed}, but is made from {made.logical_name} "
            f"{made.logical}"
        )
    _check_told(write, made, False)
    return made


def _check_told(write: _Write, made: Piece, fused: bool) -> None:
    """Checks that a box with only part of a tile is marked as cut."""
    rule = write.rule
    extents = write.extents[made.logical_name]
    assert rule is not None
    whole = rule.whole_tiles(made.logical, extents) and not (fused and of_whole_tensor(rule))
    if not whole and not write.cut:
        raise ProofError(
            f"{write.where}: {made.logical_name} {made.logical} cuts tiles, but is not marked as cut"
        )


def _check_same_elements(
    where: str, held: LocalTensor, local: Box, logical_name: str, logical: Box
) -> None:
    """Checks that `local` of the source tensor has exactly the elements `logical` of the logical
    tensor.
    """
    covered = 0
    for piece in held.pieces:
        common = piece.local.intersect(local)
        if common is None:
            continue
        found = common.move(piece.local, piece.logical)
        expected = common.move(local, logical)
        if piece.logical_name != logical_name or found != expected:
            raise ProofError(
                f"{where}: needs {expected} of {logical_name}, but {held.name} has {found} of "
                f"{piece.logical_name} there"
            )
        covered += common.numel
    if covered != local.numel:
        raise ProofError(f"{where}: {local} of {held.name} is partly padding")


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
            if (clash := _overlap([piece.local for piece in tensor.pieces])) is not None:
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
    for one, other in (
        pair for alike in namesakes.values() for pair in itertools.combinations(alike, 2)
    ):
        (first, end), (other_first, other_end) = (
            (each.first_layer, each.first_layer + each.instances) for each in (one, other)
        )
        if max(first, other_first) < min(end, other_end) and len(
            np.intersect1d(one.ranks, other.ranks)
        ):
            raise ProofError(f"{layout.name}: two kinds have one name")


def _quantises(map: ReshardMap) -> bool:
    return any(kind.rule is not None for kind in map.destination.kinds)


def _extents(tensors: Iterable[LocalTensor]) -> dict[str, tuple[int, ...]]:
    """Logical tensor -> its shape, which is the extent of its pieces."""
    extents: dict[str, tuple[int, ...]] = {}
    for tensor in tensors:
        for piece in tensor.pieces:
            known = extents.get(piece.logical_name, piece.logical.end)
            extents[piece.logical_name] = tuple(map(max, known, piece.logical.end))
    return extents
