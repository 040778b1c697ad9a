"""Writing out a rank's own part of a reshard map: from template rows to copies, layer by layer, expert by expert."""

from __future__ import annotations

from typing import TYPE_CHECKING, Iterator, Optional

import numpy as np
from msgspec.structs import replace

from megarl.models.parameters import EXPERT_FIELD, LAYER_FIELD
from megarl.reshard.box import Box
from megarl.reshard.copies import Copy, Quantisation
from megarl.reshard.kinds import Kind, LocalTensor
from megarl.reshard.rows import ZEROS, Holder, Row
from megarl.reshard.scales import of_whole_tensor

if TYPE_CHECKING:
    from megarl.reshard.map import ReshardMap

_Entry = tuple[int, int, list[tuple[int, int]]]  # instance, index into row.holders, (sender, receiver) pairs
_Group = tuple[tuple[int, int], list[Copy]]  # (depth, number of the row), its copies by receiver


def sent(map: ReshardMap, rank: int, rows: tuple[Row, ...]) -> Iterator[_Group]:
    """What `rank` of the source sends, unordered."""
    seats = {(k, s) for k, kind in enumerate(map.source.kinds) for _, s, _ in kind.seats(rank)}
    mine: dict[tuple, list[_Entry]] = {}  # by route
    for number, row in enumerate(rows):
        if not any([(h.kind, h.shard) in seats for h in row.holders]):
            continue
        route = row.route
        if route not in mine:
            mine[route] = _served(map, rank, row)
        yield from _groups(map, number, row, mine[route])


def _served(map: ReshardMap, rank: int, row: Row) -> list[_Entry]:
    """What `rank` sends of a row."""
    holders, ranks = map.senders(row)
    found = np.nonzero(ranks == rank)
    receivers: dict[tuple[int, int], list[int]] = {}
    for instance, holder, receiver in zip(found[0].tolist(), holders[found].tolist(), map.receivers(row)[found].tolist()):
        receivers.setdefault((instance, holder), []).append(receiver)
    return [(instance, holder, [(rank, receiver) for receiver in own]) for (instance, holder), own in receivers.items()]


def received(map: ReshardMap, rank: int, rows: tuple[Row, ...]) -> Iterator[_Group]:
    """What `rank` of the destination receives, unordered."""
    seats: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for k, kind in enumerate(map.destination.kinds):
        for stage, s, e in kind.seats(rank):
            seats.setdefault((k, s), []).append((stage, e))
    mine: dict[tuple, list[_Entry]] = {}  # by route
    for number, row in enumerate(rows):
        if (row.kind, row.shard) not in seats:
            continue
        route = row.route
        if route not in mine:
            mine[route] = [entry for stage, replica in seats[row.kind, row.shard] for entry in _taken(map, rank, row, stage, replica)]
        yield from _groups(map, number, row, mine[route])


def _taken(map: ReshardMap, rank: int, row: Row, stage: int, replica: int) -> Iterator[_Entry]:
    """What `rank` receives of a row in this seat."""
    instances = np.flatnonzero(map.destination.kinds[row.kind].stages == stage)
    holders, ranks = map.senders(row, instances, replica)
    for instance, holder, sender in zip(instances.tolist(), holders[:, 0].tolist(), ranks[:, 0].tolist()):
        yield instance, holder, [(sender, rank)]


def _groups(map: ReshardMap, number: int, row: Row, entries: list[_Entry]) -> Iterator[_Group]:
    target, transform, box = map.destination.kinds[row.kind], row.transform, row.box
    dtype, apart, zeros = target.shards[row.shard].dtype, map.of_experts(row), transform == ZEROS
    first_depth = map.destination.depth(target, 0)
    before, layered, after = target.name.partition(LAYER_FIELD)
    origins = [map.source.kinds[holder.kind].name.partition(LAYER_FIELD) for holder in row.holders]
    quantised, how = row.logical is not None, None
    if quantised:
        weights = target if row.travels_with is None else map.destination.kinds[row.travels_with]
        tiles = tile_space(weights, row.logical_name).partition(LAYER_FIELD)
        rule, corner, cut = weights.rule, row.logical.start[-2:], row.cut
    for instance, holder, pairs in entries:
        depth, layer = first_depth + instance, target.first_layer + instance
        name = f"{before}{layer}{after}" if layered else before
        if zeros:
            yield (depth, number), [Copy(s, None, None, r, name, box, transform, dtype, depth) for s, r in pairs]
            continue
        origin = origins[holder]
        source_name = f"{origin[0]}{layer}{origin[2]}" if origin[1] else origin[0]
        if quantised:
            how = Quantisation(rule, f"{tiles[0]}{layer}{tiles[2]}" if tiles[1] else tiles[0], corner, cut)
        if apart:
            items = list(_of_each_expert(map, row, row.holders[holder], source_name, name, how))
            copies = [
                Copy(s, source, here, r, there, target_box, transform, dtype, depth, of_expert)
                for s, r in pairs
                for source, here, there, target_box, of_expert in items
            ]
        else:
            here = row.holders[holder].box
            copies = [Copy(s, source_name, here, r, name, box, transform, dtype, depth, how) for s, r in pairs]
        yield (depth, number), copies


def _of_each_expert(
    map: ReshardMap, row: Row, held: Holder, source_name: str, name: str, how: Optional[Quantisation]
) -> Iterator[tuple[str, Box, str, Box, Optional[Quantisation]]]:
    """(source tensor, its box, destination tensor, its box, how) of the row's experts at one layer."""
    here, there = map.source.kinds[held.kind].shards[held.shard], map.destination.kinds[row.kind].shards[row.shard]
    assert held.box is not None
    for e in range(row.box.shape[0]):
        source_expert, source_box = _one_expert(here, held.box, e)
        expert, box = _one_expert(there, row.box, e)
        assert source_expert == expert
        field = str(expert)
        own = None if how is None else replace(how, tiles_of=how.tiles_of.replace(EXPERT_FIELD, field))
        yield source_name.replace(EXPERT_FIELD, field), source_box, name.replace(EXPERT_FIELD, field), box, own


def tile_space(weights: Kind, logical_name: str) -> str:
    """Template of Quantisation.tiles_of: tiles of equal name and number share a scale."""
    assert weights.rule is not None
    if not of_whole_tensor(weights.rule):
        return logical_name
    return weights.name if weights.shards[0].experts is None else f"{weights.name} {EXPERT_FIELD}"


def _one_expert(tensor: LocalTensor, box: Box, e: int) -> tuple[int, Box]:
    """(global expert, box in the tensor that the rank really has) of the e-th expert of a template box."""
    assert tensor.experts is not None
    local = box.start[0] + e
    expert = tensor.experts[0] + local
    if EXPERT_FIELD in tensor.name:
        return expert, box.drop()
    return expert, Box((local,) + box.start[1:], (1,) + box.shape[1:])
