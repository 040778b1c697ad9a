"""Finds the senders that hold parts of a cut tile of a quantised tensor, and who must learn its amax.

Parts belong to source tensors, whatever copies are made of them. Every data-parallel replica computes its amax for itself, among
the ranks that together hold one whole model; so it does not matter which replica sends what.

    parts = amax_parts(map, rank)                                 once
    table = AmaxTable.measure(parts, own tensors)                 each update, before the first copy
    … exchange `table.entries` with `peers(parts)` …              by the transport's own means
    table.merge(entries)                                          the entries of each peer
    payload(copy, source, table)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megarl.box import Box
from megarl.kernels.quantise_rules import Rule
from megarl.models.parameters import EXPERT_FIELD, LAYER_FIELD
from megarl.reshard.kinds import Kind
from megarl.reshard.lists import tile_space
from megarl.reshard.map import ReshardMap
from megarl.reshard.scales import of_whole_tensor
from megarl.reshard.template import QUANTISE, Holder, stripes_of


@dataclass(frozen=True, slots=True)
class AmaxPart:
    """A box of one of this rank's tensors that has parts of cut tiles."""

    tiles_of: str  # as Quantisation.tiles_of
    rule: Rule
    source_tensor: str
    source_box: Box
    origin: tuple[int, int]  # of the box's first element in the logical tensor
    tiles: Box  # the tiles that it touches, [tile rows, tile columns]
    peers: tuple[int, ...]  # source ranks that hold other shares of these tiles


def amax_parts(map: ReshardMap, rank: int) -> list[AmaxPart]:
    """The parts that source rank `rank` must measure, in forward order. Empty if no copy of any rank cuts a tile."""
    return [part for _, part in sorted(_parts(map, rank), key=lambda entry: entry[0])]


def peers(parts: list[AmaxPart]) -> tuple[int, ...]:
    """The ranks to exchange with. The relation is mutual: every rank of a group names all others."""
    return tuple(sorted({peer for part in parts for peer in part.peers}))


def _parts(map: ReshardMap, rank: int) -> Iterator[tuple[tuple, AmaxPart]]:
    stripes = stripes_of(map.source)
    coordinates = {(k, s): (stage, e) for k, kind in enumerate(map.source.kinds) for stage, s, e in kind.coordinates(rank)}
    for number, kind in enumerate(map.destination.kinds):
        if kind.rule is None:
            continue
        cut = _cut_regions(map, number, kind.rule)
        groups: dict[str, list[tuple[str, Box, Holder]]] = defaultdict(list)  # namespace of tiles → (logical, box, holder)
        for name, regions in cut.items():
            space = tile_space(kind, name)
            for logical, holders in stripes[name, kind.layers].items():
                if any(logical.intersect(region) is not None for region in regions):
                    groups[space] += [(name, logical, holder) for holder in holders]
        for space, shares in groups.items():
            for _, logical, holder in shares:
                if (holder.kind, holder.shard) in coordinates:
                    stage, replica = coordinates[holder.kind, holder.shard]
                    others = [o for _, other, o in shares if _share_a_tile(kind.rule, logical, other)]
                    yield from _of_layers(map, kind, number, space, logical, holder, others, stage, replica)


def _cut_regions(map: ReshardMap, number: int, rule: Rule) -> dict[str, list[Box]]:
    """The boxes of cut rows by logical tensor; if one scale covers a whole parameter, all boxes."""
    rows = [row for row in map.rows if row.kind == number and row.transform == QUANTISE]
    everything = of_whole_tensor(rule) and any(row.cut for row in rows)
    regions: dict[str, list[Box]] = defaultdict(list)
    for row in rows:
        if row.cut or everything:
            regions[row.logical_name].append(_grown(rule, row.logical_box))
    return regions


def _grown(rule: Rule, logical: Box) -> Box:
    """Grows the box to whole tiles, possibly beyond the tensor."""
    start, shape = list(logical.start), list(logical.shape)
    for dim, size in ((-2, rule.rows), (-1, rule.cols)):
        if size is None:
            start[dim], shape[dim] = 0, 1 << 40
        else:
            start[dim] = logical.start[dim] // size * size
            shape[dim] = -(-logical.end[dim] // size) * size - start[dim]
    return Box(tuple(start), tuple(shape))


def _share_a_tile(rule: Rule, a: Box, b: Box) -> bool:
    return rule.tiles(a).intersect(rule.tiles(b)) is not None


def _of_layers(
    map: ReshardMap, kind: Kind, number: int, space: str, logical: Box, holder: Holder, others: list[Holder], stage: int, replica: int
) -> Iterator[tuple[tuple, AmaxPart]]:
    origin = map.source.kinds[holder.kind]
    tensor = origin.shards[holder.shard]
    rule, held, first = kind.rule, holder.held_box, (logical.start[-2], logical.start[-1])
    assert rule is not None
    tiles = rule.tiles(logical)
    for instance in np.flatnonzero(origin.stages == stage).tolist():
        layer = str(origin.first_layer + instance)
        ranks = {_rank(map, other, instance, replica) for other in others} - {_rank(map, holder, instance, replica)}
        names = space.replace(LAYER_FIELD, layer), origin.name_of(instance)
        where = map.destination.depth(kind, instance), number, names[0], logical.start
        if len(logical.start) == 2:
            yield where, AmaxPart(names[0], rule, names[1], held, first, tiles, tuple(sorted(ranks)))
            continue
        for e in range(logical.shape[0]):
            expert = str(logical.start[0] + e)
            stacked = EXPERT_FIELD not in tensor.name
            box = Box((held.start[0] + e,) + held.start[1:], (1,) + held.shape[1:]) if stacked else held.drop()
            of, source_name = (name.replace(EXPERT_FIELD, expert) for name in names)
            yield where, AmaxPart(of, rule, source_name, box, first, tiles.drop(), tuple(sorted(ranks)))


def _rank(map: ReshardMap, holder: Holder, instance: int, replica: int) -> int:
    kind = map.source.kinds[holder.kind]
    of_shard = kind.ranks[kind.stages[instance], holder.shard]
    return int(of_shard[replica % len(of_shard)])
