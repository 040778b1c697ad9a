"""Writing out a rank's own part of a reshard map: from template rows to copies, layer by layer, expert by expert.

This is where layers are expanded, so it is what a rank waits for at start-up: names are made once per kind and layer, and copies are
put where they belong by depth instead of being sorted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Callable, Iterator, Optional

import numpy as np

from megarl.models.parameters import EXPERT_FIELD, LAYER_FIELD
from megarl.reshard.box import Box
from megarl.reshard.copies import Copy, Quantisation
from megarl.reshard.kinds import Kind, LocalTensor
from megarl.reshard.rows import ZEROS, Holder, Row
from megarl.reshard.scales import of_whole_tensor

if TYPE_CHECKING:
    from megarl.reshard.map import ReshardMap

_Pairs = list[tuple[int, int]]  # sender, receiver
_Entry = tuple[int, int, _Pairs]  # instance, index into row.holders
_Served = Callable[[Row], Optional[list[_Entry]]]  # a rank's share of a row; None: it has no part in it


def sent(map: ReshardMap, rank: int, rows: tuple[Row, ...]) -> list[Copy]:
    """What `rank` of the source sends, in forward order."""
    seats: dict[tuple[int, int], list[int]] = {}
    for k, kind in enumerate(map.source.kinds):
        for stage, s, _ in kind.seats(rank):
            seats.setdefault((k, s), []).append(stage)
    return _List(map).of(rows, partial(_given, map, rank, seats))


def received(map: ReshardMap, rank: int, rows: tuple[Row, ...]) -> list[Copy]:
    """What `rank` of the destination receives, in forward order."""
    seats: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for k, kind in enumerate(map.destination.kinds):
        for stage, s, e in kind.seats(rank):
            seats.setdefault((k, s), []).append((stage, e))
    return _List(map).of(rows, partial(_taken, map, rank, seats))


def _given(map: ReshardMap, rank: int, seats: dict[tuple[int, int], list[int]], row: Row) -> Optional[list[_Entry]]:
    """`seats`: stages at which the rank holds a shard, by kind and shard."""
    found = [seats.get((holder.kind, holder.shard)) for holder in row.holders]
    if not any(found):
        return None
    service = map.service(row, stages=found[0] if len(found) == 1 else None)
    of_class: dict[int, list[tuple[int, _Pairs]]] = {}
    own = np.nonzero(service.senders == rank)  # class, replica
    for c, holder, receiver in zip(own[0].tolist(), service.holders[own].tolist(), service.receivers[own].tolist()):
        groups = of_class.setdefault(c, [])
        if not groups or groups[-1][0] != holder:
            groups.append((holder, []))
        groups[-1][1].append((rank, receiver))
    classes = service.class_of.tolist()
    return [(i, holder, pairs) for i, c in enumerate(classes) if c in of_class for holder, pairs in of_class[c]]


def _taken(map: ReshardMap, rank: int, seats: dict[tuple[int, int], list[tuple[int, int]]], row: Row) -> Optional[list[_Entry]]:
    if (row.kind, row.shard) not in seats:
        return None
    stages = map.destination.kinds[row.kind].stages.tolist()
    entries: list[_Entry] = []
    for stage, replica in seats[row.kind, row.shard]:
        service = map.service(row, replica)
        holders, pairs = service.holders[:, 0].tolist(), [[(s, rank)] for s in service.senders[:, 0].tolist()]
        entries += [(i, holders[c], pairs[c]) for i, c in enumerate(service.class_of.tolist()) if stages[i] == stage]
    return entries


@dataclass
class _List:
    """One rank's list in the making."""

    map: ReshardMap
    names: dict[tuple, list[str]] = field(default_factory=dict)  # by what `_names` was asked
    hows: dict[tuple, list[Optional[Quantisation]]] = field(default_factory=dict)  # by what `_hows` was asked
    by_depth: list[list[Copy]] = field(default_factory=list)

    def of(self, rows: tuple[Row, ...], served: _Served) -> list[Copy]:
        """Forward order: by depth, then as rows stand."""
        self.by_depth = [[] for _ in range(self.map.destination.num_layers + 2)]
        known: dict[tuple, Optional[list[_Entry]]] = {}  # by route
        for row in rows:
            route = row.route
            if route not in known:
                known[route] = served(row)
            entries = known[route]
            if entries:
                self._add(row, entries)
        return list(chain.from_iterable(self.by_depth))

    def _add(self, row: Row, entries: list[_Entry]) -> None:
        target, transform, box = self.map.destination.kinds[row.kind], row.transform, row.box
        dtype, layer, depth = target.shards[row.shard].dtype, target.first_layer, self.map.destination.depth(target, 0)
        by_depth, instances = self.by_depth, tuple([i for i, _, _ in entries])
        names = self._names(target.name, layer, instances)
        if transform == ZEROS:
            for (i, _, pairs), name in zip(entries, names):
                at = depth + i
                for s, r in pairs:
                    by_depth[at].append(Copy(s, None, None, r, name, box, transform, dtype, at))
            return
        origins = [(self._names(self.map.source.kinds[holder.kind].name, layer, instances), holder) for holder in row.holders]
        apart = self.map.of_experts(row)
        hows = self._hows(row, target, instances)
        for n, ((i, h, pairs), name, how) in enumerate(zip(entries, names, hows)):
            at = depth + i
            copies, (source_names, held) = by_depth[at], origins[h]
            source_name, here = source_names[n], held.box
            if apart:
                items = list(_of_each_expert(self.map, row, held, source_name, name, how))
                copies += [Copy(s, x, a, r, y, b, transform, dtype, at, q) for s, r in pairs for x, a, y, b, q in items]
                continue
            for s, r in pairs:
                copies.append(Copy(s, source_name, here, r, name, box, transform, dtype, at, how))

    def _hows(self, row: Row, target: Kind, instances: tuple[int, ...]) -> list[Optional[Quantisation]]:
        if row.logical is None:
            return [None] * len(instances)
        weights = target if row.travels_with is None else self.map.destination.kinds[row.travels_with]
        asked = tile_space(weights, row.logical_name), target.first_layer, instances, row.logical.start[-2:], row.cut
        if asked not in self.hows:  # weights and their scales have the same
            rule, corner, cut = weights.rule, asked[3], asked[4]
            assert rule is not None
            self.hows[asked] = [Quantisation(rule, name, corner, cut) for name in self._names(*asked[:3])]
        return self.hows[asked]

    def _names(self, template: str, first: int, instances: tuple[int, ...]) -> list[str]:
        """Of each instance, the 0th of which is of layer `first`. A template that is not of layers has one name."""
        asked = template, first, instances
        if asked not in self.names:
            before, layered, after = template.partition(LAYER_FIELD)
            self.names[asked] = [f"{before}{first + i}{after}" for i in instances] if layered else [before] * len(instances)
        return self.names[asked]


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
        number = str(expert)
        own = None if how is None else Quantisation(how.rule, how.tiles_of.replace(EXPERT_FIELD, number), how.origin, how.cut)
        yield source_name.replace(EXPERT_FIELD, number), source_box, name.replace(EXPERT_FIELD, number), box, own


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
