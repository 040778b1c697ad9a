"""Proof that a reshard map writes every destination element exactly once, from the place that holds that element.

It takes nothing from how the map was built. From the two layouts it knows which elements every tensor must hold, and checks
extents, disjointness and total volume of the boxes written, that each box's source speaks of the same logical elements, and
that every sender really holds the tensor it is to send.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Iterable, Optional, Sequence

import numpy as np

from megarl.reshard.box import Box
from megarl.reshard.kinds import Layout, LocalTensor
from megarl.reshard.map import Copy, ReshardMap
from megarl.reshard.rows import CAST, IDENTITY, ZEROS, Row


class ProofError(RuntimeError):
    """The map would leave an element unwritten, write it twice, or write something else there."""


def prove_exactly_once(map: ReshardMap) -> None:
    """Proves template rows and joined write rows per shard, then senders and receivers of all layers and replicas.

    Raises ProofError naming tensor and rank.
    """
    for layout in (map.source, map.destination):
        _check_seats(layout)
    for rows in (map.rows, map.write_rows):
        _check_rows(map, rows)
    checked: set[tuple] = set()
    for row in map.rows:
        if row.route not in checked:
            checked.add(row.route)
            _check_senders(map, row)


def prove_copies(copies: Iterable[Copy], source: Layout, destination: Layout) -> None:
    """The same proof on a plain list of all copies, tensor by tensor. Raises ProofError naming tensor and rank."""
    by_rank: dict[int, dict[str, list[Copy]]] = defaultdict(lambda: defaultdict(list))
    for copy in copies:
        by_rank[copy.destination_rank][copy.destination_tensor].append(copy)
    sources = [{tensor.name: tensor for tensor in source.tensors(rank)} for rank in range(source.world_size)]
    for rank in range(destination.world_size):
        pending = by_rank.pop(rank, {})
        for tensor in destination.tensors(rank):
            where = f"{tensor.name} on {destination.name} rank {rank}"
            writes = pending.pop(tensor.name, [])
            _check_cover(where, tensor.shape, [copy.destination_box for copy in writes])
            for copy in writes:
                held = None
                if copy.transform != ZEROS:
                    held = sources[copy.source_rank].get(copy.source_tensor or "")
                    if held is None:
                        raise ProofError(f"{where}: {source.name} rank {copy.source_rank} has no {copy.source_tensor}")
                _check_content(where, tensor, copy.destination_box, copy.transform, held, copy.source_box)
        for name in pending:
            raise ProofError(f"{name} on {destination.name} rank {rank}: written, but not in the layout")
    for rank in by_rank:
        raise ProofError(f"{destination.name} rank {rank} is written, but not in the layout")


def _check_rows(map: ReshardMap, rows: Sequence[Row]) -> None:
    of_shard: dict[tuple[int, int], list[Row]] = defaultdict(list)
    for row in rows:
        of_shard[row.kind, row.shard].append(row)
    for k, kind in enumerate(map.destination.kinds):
        for t, tensor in enumerate(kind.shards):
            where = f"{kind.name_of(0)} on {map.destination.name} rank {kind.ranks[kind.stages[0], t, 0]}"
            own = of_shard.pop((k, t), [])
            _check_cover(where, tensor.shape, [row.box for row in own])
            for row in own:
                for holder in row.holders:
                    origin = map.source.kinds[holder.kind]
                    held = None if row.transform == ZEROS else origin.shards[holder.shard]
                    _check_content(where, tensor, row.box, row.transform, held, holder.box)
                    if held is not None and (origin.instances != kind.instances):
                        raise ProofError(f"{where}: {kind.instances} instances from {origin.instances} of {origin.name}")
                    if held is not None and ("{layer}" in origin.name) != ("{layer}" in kind.name):
                        raise ProofError(f"{where}: comes from {origin.name}, which does not repeat over the same layers")
    for k, t in of_shard:
        raise ProofError(f"destination kind {k}, shard {t}: written, but not in the layout")


def _check_cover(where: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Inside the tensor, disjoint, and of the tensor's volume: so every element exactly once."""
    for box in boxes:
        if len(box.shape) != len(shape) or any(a < 0 or n < 1 or a + n > m for a, n, m in zip(box.start, box.shape, shape)):
            raise ProofError(f"{where}: {box} is not inside shape {shape}")
    clash = _overlap(boxes)
    if clash is not None:
        raise ProofError(f"{where}: written twice, by {clash[0]} and {clash[1]}")
    missing = int(np.prod(shape, dtype=np.int64)) - sum(box.numel for box in boxes)
    if missing:
        raise ProofError(f"{where}: {missing} elements are never written")


def _overlap(boxes: Sequence[Box]) -> Optional[tuple[Box, Box]]:
    """Two boxes with a common element, or None. Sweeps the dim with most cuts, so that few boxes are open at a time."""
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


def _check_content(where: str, tensor: LocalTensor, box: Box, transform: str, held: Optional[LocalTensor], origin: Optional[Box]) -> None:
    """`box` of the destination tensor receives its own logical elements: from `origin` of the tensor `held`, or zeros."""
    wanted = [(piece, common) for piece in tensor.pieces if (common := piece.local.intersect(box)) is not None]
    if transform == ZEROS:
        if wanted:
            raise ProofError(f"{where}: zeros in {box} overwrite {wanted[0][0].logical_name}")
        return
    if held is None or origin is None or origin.shape != box.shape:
        raise ProofError(f"{where}: {box} comes from {origin}")
    if any(a < 0 or a + n > m for a, n, m in zip(origin.start, origin.shape, held.shape)):
        raise ProofError(f"{where}: source {origin} is not inside {held.name} of shape {held.shape}")
    if transform != (IDENTITY if held.dtype == tensor.dtype else CAST):
        raise ProofError(f"{where}: {transform} from {held.dtype} to {tensor.dtype}")
    if sum(common.numel for _, common in wanted) != box.numel:
        raise ProofError(f"{where}: {box} from {held.name} also covers padding, which must hold zeros")
    for piece, common in wanted:
        _check_same_elements(where, held, common.move(box, origin), piece.logical_name, common.move(piece.local, piece.logical))


def _check_same_elements(where: str, held: LocalTensor, local: Box, logical_name: str, logical: Box) -> None:
    """`local` of the source tensor holds exactly `logical` of the logical tensor."""
    covered = 0
    for piece in held.pieces:
        common = piece.local.intersect(local)
        if common is None:
            continue
        found = common.move(piece.local, piece.logical)
        expected = common.move(local, logical)
        if piece.logical_name != logical_name or found != expected:
            raise ProofError(f"{where}: needs {expected} of {logical_name}, but {held.name} has {found} of {piece.logical_name} there")
        covered += common.numel
    if covered != local.numel:
        raise ProofError(f"{where}: {local} of {held.name} is partly padding")


def _check_seats(layout: Layout) -> None:
    """Ranks exist, no rank holds two shards or replicas of one instance, and no pieces of one tensor overlap."""
    names = [kind.name for kind in layout.kinds]
    if len(set(names)) != len(names):
        raise ProofError(f"{layout.name}: two kinds have one name")
    for kind in layout.kinds:
        for stage in np.unique(kind.stages):
            ranks = kind.ranks[stage].ravel()
            if ranks.min() < 0 or ranks.max() >= layout.world_size or len(np.unique(ranks)) != len(ranks):
                raise ProofError(f"{layout.name}: ranks of {kind.name} on stage {stage} are not distinct ranks")
        for shard, tensor in enumerate(kind.shards):
            if (clash := _overlap([piece.local for piece in tensor.pieces])) is not None:
                raise ProofError(f"{layout.name}: pieces {clash} of {kind.name}, shard {shard}, overlap")


def _check_senders(map: ReshardMap, row: Row) -> None:
    """Every instance and replica has one sender, and that rank holds the sending shard of that instance."""
    target = map.destination.kinds[row.kind]
    chosen, ranks = map.senders(row)
    if ranks.shape != (target.instances, target.ranks.shape[2]):
        raise ProofError(f"{target.name}: senders of shape {ranks.shape}")
    for h, holder in enumerate(row.holders):
        origin = map.source.kinds[holder.kind]
        seated = np.zeros((origin.ranks.shape[0], map.source.world_size), dtype=bool)  # [stages, ranks]
        np.put_along_axis(seated, origin.ranks[:, holder.shard], True, axis=1)
        stages = origin.stages if origin.instances == target.instances else np.zeros(target.instances, int)
        wrong = (chosen == h) & ~seated[stages[:, None], ranks]
        if wrong.any():
            i, e = (int(x) for x in np.argwhere(wrong)[0])
            receiver = target.ranks[target.stages[i], row.shard, e]
            raise ProofError(
                f"{target.name_of(i)} on {map.destination.name} rank {receiver}: "
                f"{map.source.name} rank {ranks[i, e]} does not hold {origin.name_of(i)}"
            )
